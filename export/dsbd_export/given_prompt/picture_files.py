"""Settings of a checkpoint's pictures: what its processor files say, as fields of entries.

Both kinds of pictures share the values of pixels, and the order in which a model returns rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsbd_export.checkpoints.checkpoint_files import json_object_or_none
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.errors import ExportError
from dsbd_runtime.parts.given_medium import MediumEntry
from dsbd_runtime.parts.given_rows import GivenEntry

LANCZOS, BICUBIC = 1, 3
HALVES = [0.5] * 3, [0.5] * 3
CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

_PICTURES, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
_STEPS = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
    **dict.fromkeys(("do_image_splitting", "crop_to_patches"), True),
    "fine_route": False,  # of its encoder the graph has the other one
}


def picture_settings(files: CheckpointFiles) -> dict[str, Any]:
    """Return the settings of the checkpoint's pictures.

    Raises ExportError without a file of them, or for steps that a front end has not.
    """
    found: dict[str, Any] | None
    found = (json_object_or_none(files.folder / _PROCESSOR) or {}).get("image_processor")
    found = found or json_object_or_none(files.folder / _PICTURES)
    if found is None:
        raise refused(
            files,
            f"its pictures have no settings: {_PICTURES} is missing, and {_PROCESSOR} has no "
            f"image_processor; copy {_PICTURES} of its base model",
        )
    for step, expected in _STEPS.items():
        if found.get(step, expected) != expected:
            raise refused(files, f"its pictures have {step} {not expected}, expected {expected}")
    return found


def values_of_pixels(
    settings: Mapping[str, Any], resample: int, colors: tuple[list[float], list[float]]
) -> dict[str, Any]:
    """Return the fields of ``PixelValues``.

    resample, colors: transformers' defaults, the latter a mean and a deviation of each color.
    """
    mean, deviation = colors
    return {
        "resample": settings.get("resample", resample),
        "rescale_factor": settings.get("rescale_factor", 1 / 255),
        "mean": settings.get("image_mean", mean),
        "std": settings.get("image_std", deviation),
    }


def check_alike(files: CheckpointFiles, name: str, found: object, expected: object) -> None:
    """Raise ExportError for a setting of pictures that contradicts the encoder's config."""
    if found != expected:
        raise refused(
            files,
            f"{name} of its pictures is {found!r}, its encoder reads {expected!r} (config.json); "
            f"copy {_PICTURES} of its base model",
        )


def refused(files: CheckpointFiles, reason: str) -> ExportError:
    """Return the error for a checkpoint."""
    return ExportError(f"the {files.role} at {files.folder} cannot be exported: {reason}")


def given_of(
    files: CheckpointFiles, medium: MediumEntry, *, levels: int = 0, position_axes: int = 1
) -> GivenEntry:
    """Return the entry of a model with these pictures."""
    return GivenEntry(
        placeholder_token_id=files.config.image_token_id,
        width=files.config.get_text_config().hidden_size,
        levels=levels,
        position_axes=position_axes,
        medium=medium,
    )


def own_rows(model: Any, arguments: Mapping[str, Tensor]) -> Tensor:
    """See GivenKind."""
    found = model.get_image_features(**arguments, return_dict=True)
    levels = getattr(found, "deepstack_features", None) or []
    parts = (found.pooler_output, *levels)
    return torch.cat([torch.cat(list(of_pictures)) for of_pictures in parts], dim=1)
