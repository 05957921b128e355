"""Objects that are made when they are first needed, and dropped if others are used more."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Objects of the ``most`` latest used keys, made when they are missing; thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[Hashable]:
        """The keys that have an object, the latest used last."""
        return list(self._found)

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            found = self._found[key] = self._found.pop(key, None) or make()
            if len(self._found) > self._most:
                self._found.popitem(last=False)
            return found
