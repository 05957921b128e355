"""Table models with features: a feature is the path of its node, so a wrong one is found out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import ZEROS, ParentFeatures
from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding import TableModel
from dsbd_ort.decoding.engine_call import Role
from tests.decoding.tables import LogitsOf

Ints = NDArray[np.int64]
Path = tuple[int, ...]


@dataclass(frozen=True)
class TableFeatures:
    """Features of rows: the path of each."""

    role: Role
    paths: list[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def copied(self, row: int) -> TableFeatures:
        return TableFeatures(self.role, [self.paths[row]])


class TableTarget(TableModel):
    """A target with features. ``num_features`` counts the features that it has returned."""

    num_features = 0

    def __init__(self, vocab_size: int, logits_of: LogitsOf) -> None:
        super().__init__(vocab_size, logits_of)
        self.spec = EngineSpec(vocab_size=vocab_size, returns_features=True)

    def forward(self, forward: Forward) -> ForwardResult:
        result = super().forward(forward)
        if forward.feature_rows is None:
            return result
        assert (np.diff(forward.feature_rows) > 0).all()
        paths = self.computed_paths[len(self.computed_paths) - forward.num_new :]
        self.num_features += len(forward.feature_rows)
        kept = TableFeatures("target", [paths[row] for row in forward.feature_rows])
        return ForwardResult(result.logits, kept)


class TableDraft(TableModel):
    """A feature draft whose logits depend on which kind of feature a row came from.

    It checks that every row came from the feature of its own parent: of ``target`` where that has
    computed the parent, else of itself.

    Attributes:
        kinds: of every row that it computed: its path, and the kind of feature it came from.
    """

    def __init__(
        self, vocab_size: int, from_target: LogitsOf, from_own: LogitsOf, target: TableTarget | None
    ) -> None:
        """``target`` is None for several requests: another one may have computed the parent."""
        super().__init__(vocab_size, from_target)
        self.spec = EngineSpec(vocab_size=vocab_size, reads_features=True)
        self._tables: dict[str, LogitsOf] = {
            "zeros": from_target,
            "target": from_target,
            "draft": from_own,
        }
        self._target = target
        self.kinds: list[tuple[Path, str]] = []

    def forward(self, forward: Forward) -> ForwardResult:
        parents = forward.parent_features
        assert parents is not None, "a feature draft is called without features"
        assert len(parents.sources) == len(parents.rows) == forward.num_new
        super().forward(dataclasses.replace(forward, logit_rows=np.arange(0)))
        seen = self.computed_paths[len(self.computed_paths) - forward.num_new :]
        paths = [self._whole_path(path, parents, s) for s, path in enumerate(seen)]
        self.computed_paths[-len(paths) :] = paths
        kinds = [self._kind(path, parents, s) for s, path in enumerate(paths)]
        self.kinds += zip(paths, kinds, strict=True)
        logits = [self._tables[kinds[s]](paths[s]) for s in forward.logit_rows]
        values = np.array(logits, dtype=np.float32).reshape(len(logits), self.spec.vocab_size)
        return ForwardResult(DenseLogits(values), TableFeatures("draft", paths))

    def _path(self, seen: NDArray[np.bool_], position: np.int64) -> Path:
        """A row sees all of its path but the first token, which sees itself."""
        order = np.argsort(self._positions[seen])
        expected = np.arange(1, position + 1) if position else np.zeros(1)
        assert np.array_equal(self._positions[seen][order], expected), self._positions[seen]
        return tuple(self._tokens[seen][order].tolist())

    @staticmethod
    def _whole_path(seen: Path, parents: ParentFeatures, s: int) -> Path:
        """The path of a row: what its parent's feature says, and its token."""
        if (source := int(parents.sources[s])) == ZEROS:
            return seen
        features = parents.forwards[source]
        assert isinstance(features, TableFeatures)
        path = (*features.paths[parents.rows[s]], seen[-1])
        assert path[1:] == seen, f"{seen} comes from the feature of {path[:-1]}"
        return path

    def _kind(self, path: Path, parents: ParentFeatures, s: int) -> str:
        source = int(parents.sources[s])
        if len(path) == 1 or source == ZEROS:
            assert len(path) == 1 and source == ZEROS, f"{path} comes from {source}"
            return "zeros"
        features = parents.forwards[source]
        if self._target is not None:
            is_known = path[:-1] in set(self._target.computed_paths)
            assert features.role == ("target" if is_known else "draft"), f"{path}: {features.role}"
        return features.role


def check_computed_twice(draft: TableDraft, num_prompt: int) -> Counter[int]:
    """Check which nodes a draft has computed again: each once, after it came from its own feature.

    Returns how many nodes it computed once, twice.
    """
    by_path: dict[Path, list[str]] = {}
    for path, kind in draft.kinds:
        if len(path) >= num_prompt:
            by_path.setdefault(path, []).append(kind)
    for path, kinds in by_path.items():
        assert kinds in (["target"], ["draft"], ["draft", "target"], ["zeros"]), (path, kinds)
    return Counter(len(kinds) for kinds in by_path.values())


def pair_of(
    vocab_size: int,
    target: LogitsOf,
    from_target: LogitsOf,
    from_own: LogitsOf,
    *,
    several: bool = False,
) -> tuple[TableTarget, TableDraft]:
    """A target and its feature draft; ``several``: for several requests."""
    of_target = TableTarget(vocab_size, target)
    draft = TableDraft(vocab_size, from_target, from_own, None if several else of_target)
    return of_target, draft
