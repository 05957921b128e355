"""Settings of sounds and pictures in a checkpoint's processor files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsbd_export.checkpoints.checkpoint_files import json_object_or_none
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.errors import ExportError

LANCZOS, HALVES = 1, ([0.5] * 3, [0.5] * 3)
_BICUBIC = 3
_CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_SETTINGS, _PROCESSOR = SETTINGS = "preprocessor_config.json", "processor_config.json"
_SOUND_PARTS = ("feature_extractor", "audio_processor")
_SOUND_DEFAULTS = {"sampling_rate": 16_000, "n_fft": 400, "hop_length": 160}
_STEPS = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
    **dict.fromkeys(("do_image_splitting", "crop_to_patches"), True),
    "fine_route": False,  # the encoder's graph has only the other route
}


def refused(files: CheckpointFiles, reason: str) -> ExportError:
    """Return the error for a checkpoint."""
    return ExportError(f"the {files.role} at {files.folder} cannot be exported: {reason}")


def sound_settings(files: CheckpointFiles, mels: str, num_mels: int, **more: int) -> dict[str, Any]:
    """Return the settings of the feature extractor, with transformers' defaults.

    mels, num_mels: name of the number of mels in the settings, and the number that the encoder
        reads. more: further defaults, which take precedence.

    Raises ExportError if the encoder reads other features, or if features are made with noise.
    """
    contents = (json_object_or_none(files.folder / name) for name in (_SETTINGS, _PROCESSOR))
    content = next((each for each in contents if each is not None), {})
    settings: dict[str, Any] = next((content[p] for p in _SOUND_PARTS if p in content), content)
    settings = {**_SOUND_DEFAULTS, mels: num_mels, **more, **settings}
    if settings[mels] != num_mels:
        raise refused(
            files,
            f"its features are {settings[mels]} mels, its encoder reads {num_mels}; copy "
            f"{_SETTINGS} of its base model",
        )
    if settings.get("dither"):
        raise refused(
            files,
            f"its features are made with noise (dither {settings['dither']!r}), which is not "
            "supported; set dither to 0.0",
        )
    return settings


def picture_settings(files: CheckpointFiles) -> dict[str, Any]:
    """Return the settings of the checkpoint's pictures.

    Raises ExportError if no file has them, or for steps that front ends do not support.
    """
    settings: dict[str, Any] | None
    settings = (json_object_or_none(files.folder / _PROCESSOR) or {}).get("image_processor")
    settings = settings or json_object_or_none(files.folder / _SETTINGS)
    if settings is None:
        raise refused(
            files,
            f"its pictures have no settings: {_SETTINGS} is missing, and {_PROCESSOR} has no "
            f"image_processor; copy {_SETTINGS} of its base model",
        )
    for step, expected in _STEPS.items():
        if settings.get(step, expected) != expected:
            raise refused(files, f"its pictures have {step} {not expected}, expected {expected}")
    return settings


def values_of_pixels(
    settings: Mapping[str, Any],
    resample: int = _BICUBIC,
    colors: tuple[list[float], list[float]] = _CLIP,
) -> dict[str, Any]:
    """Return the fields of ``PixelValues``.

    resample, colors: transformers' defaults; colors: mean and deviation of each color.
    """
    mean, deviation = colors
    return {
        "resample": settings.get("resample", resample),
        "rescale_factor": settings.get("rescale_factor", 1 / 255),
        "mean": settings.get("image_mean", mean),
        "std": settings.get("image_std", deviation),
    }


def check_alike(files: CheckpointFiles, name: str, value: object, expected: object) -> None:
    """Raise ExportError for a setting of pictures that contradicts the encoder's config."""
    if value != expected:
        raise refused(
            files,
            f"{name} of its pictures is {value!r}, its encoder reads {expected!r} (config.json); "
            f"copy {_SETTINGS} of its base model",
        )
