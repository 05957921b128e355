"""Attention rows: masks, and the keys and values of every row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsbd_export.capture.part import (
    NODES,
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
    RowSpace,
)
from dsbd_export.capture.replacements import ReplaceTorchFunctions, additive_mask
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_config import MASK_BY_LAYER_TYPE
from dsbd_runtime.parts.attention_rows import SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.cache_entries import attending, recent

EVERY_ROW = RowSpace(Axis("C", 13), WRITE_INDICES, SRC_ROWS, "K")


class ExportedAttention(ExportPart):
    """Masks and rows, which every engine has: a model with recurrences alone reads a mask too."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def contract(self) -> ExportContract:
        checkpoint = self._checkpoint
        mask = Example((1, 1, NODES, EVERY_ROW.rows), torch.bool)
        return ExportContract(
            inputs={**dict.fromkeys(checkpoint.masks, mask), WRITE_INDICES: Example((1,))},
            spaces=(EVERY_ROW,),
            caches=tuple((entry, EVERY_ROW) for entry in attending(checkpoint.caches)),
            attended=tuple(filter(None, checkpoint.layer_masks)),
            entry={"masks": checkpoint.masks, "sliding_window": checkpoint.sliding_window},
            is_leading=True,
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        @contextmanager
        def masked(call: CapturedCall) -> Iterator[None]:
            masks = [call.inputs[name] for name in self._checkpoint.masks]
            if call.form is AttentionForm.OWN:
                masks = [additive_mask(mask, model.dtype) for mask in masks]
            call.arguments["attention_mask"] = self._mask_argument(masks)
            with ReplaceTorchFunctions():
                yield

        return masked

    def _mask_argument(self, masks: list[Tensor]) -> Tensor | dict[str, Tensor | None] | None:
        """Return the masks as ``generate`` hands ready-made ones to a model.

        One tensor where all layers share it, else a dict by layer type.
        """
        checkpoint = self._checkpoint
        if not any(checkpoint.layer_masks):
            return None
        if len(masks) == 1 and not recent(checkpoint.caches):
            return masks[0]
        mask_by_name: dict[str | None, Tensor] = dict(zip(checkpoint.masks, masks, strict=True))
        return {
            kind: mask_by_name.get(name, masks[0]) if name else None
            for kind, name in MASK_BY_LAYER_TYPE.items()
        }
