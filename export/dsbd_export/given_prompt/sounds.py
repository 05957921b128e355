"""Sounds of a checkpoint: settings of its feature extractor, and features for the parity gate."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_export.checkpoints.checkpoint_files import json_object_or_none
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.errors import ExportError

_SETTINGS = ("preprocessor_config.json", "processor_config.json")
_PARTS = ("feature_extractor", "audio_processor")


def extractor_settings(
    files: CheckpointFiles, num_mels: int, name: str = "feature_size"
) -> dict[str, Any]:
    """Return the settings of the feature extractor, {} without a file of them.

    ExportError: its features are others than the encoder reads, or made with noise.

    num_mels: that the encoder reads; ``name``: of their number in the settings.
    """
    contents = (json_object_or_none(files.folder / name) for name in _SETTINGS)
    content = next((each for each in contents if each is not None), {})
    found: dict[str, Any] = next((content[part] for part in _PARTS if part in content), content)
    if found.get(name, num_mels) != num_mels:
        raise ExportError(
            f"the features of the {files.role} at {files.folder} are {found[name]} mels, its "
            f"encoder reads {num_mels}; copy {_SETTINGS[0]} of its base model"
        )
    if found.get("dither"):
        raise ExportError(
            f"the features of the {files.role} at {files.folder} are made with noise (dither "
            f"{found['dither']!r}), which is not supported; set dither to 0.0"
        )
    return found


def gate_features(num_mels: int, short: int, middle: int, long: int) -> dict[str, NDArray[Any]]:
    """Return features by name, (num_mels, frames) float32: noise, silence, tones, longest last."""
    rng = np.random.default_rng(5)
    frames, mels = np.arange(middle), np.arange(num_mels)[:, None]
    rising = frames % 100 * num_mels / 100
    found = {
        "short noise": rng.normal(size=(num_mels, short)),
        "silence": np.full((num_mels, middle // 2), -1.5),
        "tones": np.where(np.abs(mels - rising) < 2, 1.0, -0.6),
        "long noise": rng.normal(size=(num_mels, long)),
    }
    return {name: np.asarray(features, np.float32) for name, features in found.items()}
