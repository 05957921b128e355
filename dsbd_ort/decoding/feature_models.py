"""Models with features: a target that returns hidden states, a draft that reads them.

A feature is a row of numbers that belongs to a node: the target's, hidden states of its row, or the
draft's own, the hidden state of the draft's row. A feature draft computes a node from its token and
the feature of its parent. What a feature holds, and where it lies, only the engines know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.step_model import (
    EngineCall,
    Gather,
    Head,
    Logits,
    Role,
    StepModel,
)

ZEROS = -1
"""In the place of a forward: the node has no parent, and its row is computed from zeros."""


class Features(Protocol):
    """The features of rows of one forward, which stay where the engine put them while held."""

    @property
    def role(self) -> Role:
        """The engine that computed them."""

    def __len__(self) -> int:
        """Rows."""

    def copied(self, row: int) -> Features:
        """Return one of them in memory of its own, so that the others need not be held."""


@dataclass(frozen=True, slots=True)
class ParentFeatures:
    """Of each of S rows, where the feature of its node's parent lies.

    Attributes:
        forwards: the features of earlier forwards, of target and draft.
        sources: (S,) int64. Index among ``forwards``, or ``ZEROS``.
        rows: (S,) int64. Row of these features.
    """

    forwards: tuple[Features, ...]
    sources: NDArray[np.int64]
    rows: NDArray[np.int64]


class FeatureTarget(StepModel, Protocol):
    """A StepModel that also returns features; it has a true attribute ``returns_features``."""

    def forward_with_features(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        feature_rows: NDArray[np.int64],
        gather: Gather | None = None,
    ) -> tuple[Logits, Features]:
        """Append rows as ``StepModel.forward`` does; also return the features of some of them.

        feature_rows: (F,) int64 increasing. Which of the S rows they are.
        """


class FeatureDraft(StepModel, Protocol):
    """A StepModel whose rows need features; it has a true attribute ``reads_features``."""

    def forward_from_features(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        parents: ParentFeatures,
        gather: Gather | None = None,
    ) -> tuple[Logits, Features]:
        """Append rows as ``StepModel.forward`` does; also return the own features of all of them.

        parents: the feature of the parent of each row.
        """


def returns_features(model: Head) -> bool:
    """Return whether a model is a ``FeatureTarget``."""
    return bool(getattr(model, "returns_features", False))


def reads_features(model: Head) -> bool:
    """Return whether a model is a ``FeatureDraft``."""
    return bool(getattr(model, "reads_features", False))


@dataclass(eq=False, slots=True)
class FeatureCall:
    """The features of an engine call: those that its rows need, and those that it brings.

    Attributes:
        parents: of its rows, for a call of a feature draft; None for one of the target.
        returned: once the call is made, the features of its forward.
        first_row: of the call's rows in ``returned``.
    """

    parents: ParentFeatures | None = None
    returned: Features | None = None
    first_row: int = 0


def forward_of_calls(
    model: StepModel,
    calls: Sequence[EngineCall],
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    mask: NDArray[np.bool_],
    logit_rows: NDArray[np.int64],
    gather: Gather | None,
) -> Logits:
    """Make the forward of calls of which some have features; give each of these its own."""
    inputs = token_ids, positions, mask, logit_rows
    if reads_features(model):
        parents = _joined(calls)
        logits, features = cast(FeatureDraft, model).forward_from_features(*inputs, parents, gather)
    else:
        rows = _feature_rows(calls)
        logits, features = cast(FeatureTarget, model).forward_with_features(*inputs, rows, gather)
    first_row = 0
    for call in calls:
        if call.features is not None:
            call.features.returned, call.features.first_row = features, first_row
            first_row += len(call.token_ids)
    return logits


def _feature_rows(calls: Sequence[EngineCall]) -> NDArray[np.int64]:
    """Return all rows of the calls that want features, numbered as those of one forward."""
    parts, first = [np.arange(0)], 0
    for call in calls:
        if call.features is not None:
            parts.append(np.arange(first, first + len(call.token_ids)))
        first += len(call.token_ids)
    return np.concatenate(parts)


def _joined(calls: Sequence[EngineCall]) -> ParentFeatures:
    """Return the parents' features of the rows of several calls, one behind the other."""
    given = [call.features.parents for call in calls if call.features is not None]
    parents = [one for one in given if one is not None]
    assert len(parents) == len(calls)  # every call of a feature draft has them
    if len(parents) == 1:
        return parents[0]
    forwards: dict[int, Features] = {}  # by id: requests share forwards
    sources = []
    for one in parents:
        forwards |= {id(features): features for features in one.forwards}
        numbers = {key: number for number, key in enumerate(forwards)}
        numbered = [numbers[id(features)] for features in one.forwards]
        sources.append(np.array([*numbered, ZEROS])[one.sources])  # ZEROS finds the last
    rows = np.concatenate([one.rows for one in parents])
    return ParentFeatures(tuple(forwards.values()), np.concatenate(sources), rows)
