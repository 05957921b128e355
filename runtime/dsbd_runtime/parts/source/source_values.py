"""Sources that are arrays of one shape: windows of sound, and pictures."""

import hashlib
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_runtime.errors import InputError


class SourceValues:
    """The array that an encoder reads, as the source of a request; compared by its values."""

    axes: ClassVar[tuple[str, ...]]  # names of the dimensions

    def __init__(self, values: NDArray[np.float32]) -> None:
        """Copy the values; InputError: wrong number of dimensions, or values not finite."""
        copied = np.array(values, dtype=np.float32, order="C")
        if copied.ndim != len(self.axes) or not np.isfinite(copied).all():
            of_numbers = " and values that are no finite numbers" * (copied.ndim == len(self.axes))
            raise InputError(
                f"{type(self).__name__} has shape {copied.shape}{of_numbers}; expected "
                f"({', '.join(self.axes)}) finite numbers"
            )
        copied.flags.writeable = False
        self.values: NDArray[np.float32] = copied  # never written
        content = repr((type(self).__name__, copied.shape)).encode() + copied.tobytes()
        self._digest = hashlib.sha256(content).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceValues) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        sizes = zip(self.values.shape, self.axes, strict=True)
        return f"{type(self).__name__}({', '.join(f'{size} {axis}' for size, axis in sizes)})"


class FixedSource(Protocol):
    """Manifest entry of such sources."""

    input_name: ClassVar[str]  # input of the encoder's graph; its first axis is 1
    source_type: ClassVar[type[SourceValues]]
    noun: ClassVar[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""

    @property
    def num_positions(self) -> int:
        """Number of rows that the encoder returns."""


def checked_values(entry: FixedSource, source: Source) -> NDArray[np.float32]:
    """Return the values of a source; raise InputError for another kind of source or shape."""
    if not isinstance(source, entry.source_type) or source.values.shape != entry.shape:
        sizes = zip(entry.shape, entry.source_type.axes, strict=True)
        raise InputError(
            f"the source of a forward is {source!r}, but the engine reads {entry.noun}: expected "
            f"{entry.source_type.__name__} of {', '.join(f'{size} {axis}' for size, axis in sizes)}"
        )
    return source.values
