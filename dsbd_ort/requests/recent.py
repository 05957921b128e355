"""Objects that are made when they are first needed; the least recently used are dropped."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Objects of the ``max_keys`` keys that were used last, made when missing; thread-safe."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._value_by_key: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[Hashable]:
        """The keys that have an object, the latest used last."""
        return list(self._value_by_key)

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            value = self._value_by_key[key] = self._value_by_key.pop(key, None) or make()
            if len(self._value_by_key) > self._max_keys:
                self._value_by_key.popitem(last=False)
            return value
