"""A StepModel whose logits come from a function of the path: for tests and for trying things."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits
from dsbd_forward.spec import EngineSpec

Path = tuple[int, ...]


class TableModel:
    """StepModel given by its next-token logits for every path of tokens.

    It finds each node's path through the mask, so a wrong mask, row or position gives wrong logits,
    as with a real engine.
    """

    def __init__(
        self,
        vocab_size: int,
        logits_of: Callable[[Path], NDArray[np.floating]],
        context_length: int | None = None,
    ) -> None:
        """Take the table: ``logits_of(path)`` returns (vocab_size,) logits after ``path``."""
        self.spec = EngineSpec(vocab_size=vocab_size, context_length=context_length)
        self._logits_of = logits_of
        self._tokens = self._positions = np.zeros(0, dtype=np.int64)
        self.computed_paths: list[Path] = []

    @property
    def num_rows(self) -> int:
        return len(self._tokens)

    def forward(self, forward: Forward) -> ForwardResult:
        """See StepModel.forward; ValueError: a node does not see the positions 0 to its own.

        Or it has a position beyond the context.
        """
        mask, num_new = forward.mask, forward.num_new
        if mask.shape != (num_new, self.num_rows + num_new):
            raise ValueError(f"mask has shape {mask.shape}")
        self._tokens = np.concatenate([self._tokens, forward.token_ids])
        self._positions = np.concatenate([self._positions, forward.positions])
        paths = [self._path(mask[s], position) for s, position in enumerate(forward.positions)]
        self.computed_paths += paths
        logits = np.empty((len(forward.logit_rows), self.spec.vocab_size), dtype=np.float32)
        for row, s in zip(logits, forward.logit_rows, strict=True):
            row[:] = self._logits_of(paths[s])
        return ForwardResult(DenseLogits(logits))

    def keep(self, rows: NDArray[np.int64]) -> None:
        if (np.diff(rows) <= 0).any():
            raise ValueError(f"rows {rows} are not increasing")
        self._tokens, self._positions = self._tokens[rows], self._positions[rows]

    def _path(self, seen: NDArray[np.bool_], position: np.int64) -> Path:
        if self.spec.context_length is not None and position >= self.spec.context_length:
            raise ValueError(f"position {position}, context {self.spec.context_length}")
        order = np.argsort(self._positions[seen])
        if not np.array_equal(self._positions[seen][order], np.arange(position + 1)):
            raise ValueError(f"a node at position {position} sees {self._positions[seen]}")
        return tuple(self._tokens[seen][order].tolist())
