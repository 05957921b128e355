"""A tiny target with features, a feature draft for it, and what both compute in plain numpy."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.parts.feature.features import FeatureEntry
from tests.runtime.model_calls import reference_rows
from tests.runtime.tiny_graph import TinyModel

WIDTH = TinyModel().width
TARGET = TinyModel(num_layers=3, features=FeatureEntry(width=2 * WIDTH, layers=[2, 0]))
DRAFT = TinyModel(
    seed=1, num_layers=1, features=FeatureEntry(width=2 * WIDTH, own_width=TinyModel().width)
)


def features_of_target(
    model: TinyModel, ids: NDArray[np.int64], positions: NDArray[np.int64], mask: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The features (N, width) of N rows, without a cache."""
    assert model.features is not None and model.features.layers is not None
    rows = reference_rows(model, ids, positions, mask)
    return np.concatenate([rows[layer] for layer in model.features.layers], axis=1)


def of_draft(
    model: TinyModel,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    mask: NDArray[np.bool_],
    inputs: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logits and own features of N rows that come from ``inputs``, (N, draft width)."""
    rows = reference_rows(model, ids, positions, mask, inputs)
    return rows[-1] @ model.weights()["head"].astype(np.float64), rows[-1]


def input_of_target(model: TinyModel, features: NDArray[np.float64]) -> NDArray[np.float64]:
    """The draft's features computed from the target's, (N, draft width)."""
    return features @ model.weights()["fc"].astype(np.float64)


def in_dtype(dtype: str) -> tuple[TinyModel, TinyModel]:
    return replace(TARGET, dtype=dtype), replace(DRAFT, dtype=dtype)
