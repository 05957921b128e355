"""Forwards written as lists, and what they are as lists again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dsbd_forward.features import ParentFeatures
from dsbd_forward.forward import Forward, Source


@dataclass(frozen=True)
class NamedFeatures:
    """Features without values, compared by name."""

    name: str
    role: str = "target"

    def __len__(self) -> int:
        return 9

    def copied(self, row: int) -> NamedFeatures:
        raise AssertionError("no test copies them")


def new_forward(
    mask: list[list[int]],
    *,
    token_ids: list[int],
    positions: list[int],
    logit_rows: list[int],
    feature_rows: list[int] | None = None,
    parents: ParentFeatures | None = None,
    source: Source = None,
) -> Forward:
    """Return a forward."""
    return Forward(
        np.array(token_ids, np.int64),
        np.array(positions, np.int64),
        np.array(mask, np.bool_),
        np.array(logit_rows, np.int64),
        None if feature_rows is None else np.array(feature_rows, np.int64),
        parents,
        source,
    )


def new_parents(
    forwards: tuple[NamedFeatures, ...], sources: list[int], rows: list[int]
) -> ParentFeatures:
    return ParentFeatures(forwards, np.array(sources, np.int64), np.array(rows, np.int64))


def listed(forward: Forward) -> dict[str, Any]:
    """Return the arguments of ``new_forward`` that make this forward."""
    features, parents = forward.feature_rows, forward.parent_features
    return {
        "mask": forward.mask.astype(int).tolist(),
        "token_ids": forward.token_ids.tolist(),
        "positions": forward.positions.tolist(),
        "logit_rows": forward.logit_rows.tolist(),
        "feature_rows": None if features is None else features.tolist(),
        "parents": None if parents is None else listed_parents(parents),
        "source": forward.source,
    }


def listed_parents(parents: ParentFeatures) -> tuple[list[str], list[int], list[int]]:
    names = [features.name for features in parents.forwards]  # type: ignore[attr-defined]
    return names, parents.sources.tolist(), parents.rows.tolist()
