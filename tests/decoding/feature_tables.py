"""Table models with features: a feature is the path of its node, so a wrong one is found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding import TableModel
from dsbd_ort.decoding.feature_models import ZEROS, ParentFeatures
from dsbd_ort.decoding.step_model import Role
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
    """A FeatureTarget. ``num_features`` counts the features that it has returned."""

    returns_features = True
    num_features = 0

    def forward_with_features(
        self,
        token_ids: Ints,
        positions: Ints,
        mask: NDArray[np.bool_],
        logit_rows: Ints,
        feature_rows: Ints,
        gather: None = None,
    ) -> tuple[NDArray[np.float32], TableFeatures]:
        assert gather is None and (np.diff(feature_rows) > 0).all()
        logits = self.forward(token_ids, positions, mask, logit_rows)
        paths = self.computed_paths[len(self.computed_paths) - len(token_ids) :]
        self.num_features += len(feature_rows)
        return logits, TableFeatures("target", [paths[row] for row in feature_rows])


class TableDraft(TableModel):
    """A FeatureDraft whose logits depend on which kind of feature a row came from.

    It checks that every row came from the feature of its own parent: of ``target`` where that has
    computed the parent, else of itself.

    Attributes:
        kinds: of every row that it computed: its path, and the kind of feature it came from.
    """

    reads_features = True

    def __init__(
        self, vocab_size: int, from_target: LogitsOf, from_own: LogitsOf, target: TableTarget | None
    ) -> None:
        """Take the tables of rows from either kind; ``target`` None for one of several requests,
        where another one may have computed the parent."""
        super().__init__(vocab_size, from_target)
        self._tables: dict[str, LogitsOf] = {
            "zeros": from_target,
            "target": from_target,
            "draft": from_own,
        }
        self._target = target
        self.kinds: list[tuple[Path, str]] = []

    def forward(self, *_: object) -> NDArray[np.float32]:
        raise AssertionError("a feature draft is called without features")

    def forward_from_features(
        self,
        token_ids: Ints,
        positions: Ints,
        mask: NDArray[np.bool_],
        logit_rows: Ints,
        parents: ParentFeatures,
        gather: None = None,
    ) -> tuple[NDArray[np.float32], TableFeatures]:
        assert gather is None and len(parents.sources) == len(parents.rows) == len(token_ids)
        super().forward(token_ids, positions, mask, np.arange(0))
        seen = self.computed_paths[len(self.computed_paths) - len(token_ids) :]
        paths = [self._whole_path(path, parents, s) for s, path in enumerate(seen)]
        self.computed_paths[-len(paths) :] = paths
        kinds = [self._kind(path, parents, s) for s, path in enumerate(paths)]
        self.kinds += zip(paths, kinds, strict=True)
        logits = [self._tables[kinds[s]](paths[s]) for s in logit_rows]
        return (
            np.array(logits, dtype=np.float32).reshape(len(logit_rows), self.vocab_size),
            TableFeatures("draft", paths),
        )

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


MakePair = Callable[[], tuple[TableTarget, TableDraft]]
