"""Pictures of an encoder-decoder: the settings of its processor."""

import dataclasses
import re
from typing import Any

from transformers import (
    BaseImageProcessor,
    DeiTImageProcessorPil,
    DonutImageProcessorPil,
    ViTImageProcessorPil,
)

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.errors import ExportError, reason_of
from dsbd_runtime.parts.source.picture_entry import PictureEntry
from dsbd_runtime.typed_json import typed

_CLASS = re.compile(r"(ViT|DeiT|Donut)(ImageProcessor(Fast|Pil)?|FeatureExtractor)")
_PROCESSORS = {
    "ViT": ViTImageProcessorPil,
    "DeiT": DeiTImageProcessorPil,
    "Donut": DonutImageProcessorPil,
}


def picture_entry(files: CheckpointFiles) -> PictureEntry:
    """Return how pictures are read, from the processor's files.

    The number of encoder rows is filled in later. Raises ExportError if the processor is missing or
    of an unsupported class, or for unsupported settings.
    """
    if (max_source := files.options.max_source) is not None:
        raise ExportError(
            f"max_source={max_source} has no meaning for the {files.role} (family "
            f"{files.config.model_type}), whose source is a picture of fixed size; leave it out"
        )
    where = f"the picture processor of the {files.role} at {files.folder}"
    try:
        with quiet_libraries():
            settings, _ = BaseImageProcessor.get_image_processor_dict(
                str(files.folder), local_files_only=True
            )
            name = str(
                settings.get("image_processor_type") or settings.get("feature_extractor_type")
            )
            if (kind := _CLASS.fullmatch(name)) is None:
                raise ValueError(f"it is a {name}, expected one of {', '.join(_PROCESSORS)}")
            made = _PROCESSORS[kind[1]].from_dict(settings)
            return _checked(files, made, is_page=kind[1] == "Donut")
    except Exception as error:
        raise ExportError(
            f"{where} cannot be used: {reason_of(error)}; copy preprocessor_config.json of its "
            "base model"
        ) from error


def _checked(files: CheckpointFiles, made: Any, *, is_page: bool) -> PictureEntry:
    size, crop = made.size, made.crop_size if made.do_center_crop else None
    needed = ["do_resize", *(["do_thumbnail", "do_pad"] if is_page else [])]
    if missing := [name for name in needed if not getattr(made, name)]:
        raise ValueError(f"{missing[0]} is false, which is not supported")
    if size.height is None or size.width is None or (crop or size) != size:
        raise ValueError(f"size {size} and crop_size {crop} are not supported, only a fixed size")
    entry = PictureEntry(
        height=size.height,
        width=size.width,
        num_positions=1,
        resample=int(made.resample),
        rescale_factor=float(made.rescale_factor) if made.do_rescale else 1.0,
        mean=list(made.image_mean) if made.do_normalize else [0.0] * 3,
        std=list(made.image_std) if made.do_normalize else [1.0] * 3,
        keeps_proportions=is_page,
        is_turned=bool(is_page and made.do_align_long_axis),
        task_is_start="donut" in files.config.encoder.model_type,  # as transformers decides
    )
    entry = typed(PictureEntry, dataclasses.asdict(entry), "the processor")
    entry.check("the processor")
    expected = _sides(files.config.encoder.image_size)
    if (entry.height, entry.width) != expected:
        raise ValueError(f"its pictures are {size}, but the encoder reads {expected}")
    return entry


def _sides(size: Any) -> tuple[int, int]:
    """Return height and width; a size in a config is one number for both, or a pair."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)
