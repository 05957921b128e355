"""What the layers of a model cache, read from a run of it: heads, and widths of keys and values.

Names of configs do not tell: layers differ from each other, share rows, or cache latents from which
keys and values are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.model_loading import cache_name
from dsbd_export.parity_cases import ComputeIn
from dsbd_runtime.graph import ATTENTION_ROWS, CacheEntry

_NUM_ROWS = 2


class RecordingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache that remembers the shapes that each layer has handed it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **more: object,
    ) -> tuple[Tensor, Tensor]:
        """Record and append the rows of a layer."""
        self.shapes[layer_idx] = key_states.shape, value_states.shape
        found: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **more
        )
        return found


def probed_caches(
    model: PreTrainedModel, checkpoint: Checkpoint, dtype: str
) -> tuple[CacheEntry, ...]:
    """Return the caches of a model, those of its engine in ``dtype``, by a run over two tokens.

    Raises:
        ExportError: a layer caches what is no row of a key and a value for each head.
    """
    cache = RecordingCache()
    with torch.no_grad(), ComputeIn(torch.float32):
        token_ids = torch.zeros(1, _NUM_ROWS, dtype=torch.int64)
        model(input_ids=token_ids, **{cache_name(model): cache})
    if not cache.shapes:
        raise ExportError(
            f"the {checkpoint.role} (family {checkpoint.family}) hands no keys and values to a "
            "cache, so no row of it can be kept; choose another checkpoint"
        )
    entries = []
    for layer, (key, value) in sorted(cache.shapes.items()):
        if len(key) != 4 or key[:3] != value[:3] or key[2] != _NUM_ROWS:
            raise ExportError(
                f"layer {layer} of the {checkpoint.role} (family {checkpoint.family}) caches "
                f"{list(key)} and {list(value)} of {_NUM_ROWS} tokens, expected a key and a value "
                "of each token for each head; choose another checkpoint"
            )
        entries.append(
            CacheEntry(
                kind=ATTENTION_ROWS,
                layer=layer,
                num_heads=key[1],
                key_width=key[3],
                value_width=value[3],
                dtype=dtype,
            )
        )
    return tuple(entries)
