"""Attention of an encoder among all rows of one segment: a window of sound, a picture, a tile.

transformers hands packed segments to a function with "flash" in its name as they are, without
reading their lengths, which no graph can hold. An encoder's graph has one segment.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dsbd_export.capture.replacements import attention_node

_WHOLE = "flash-whole"


def attend_to_all(config: PreTrainedConfig) -> None:
    """Let the modules that have this config, an encoder's, attend among all of their rows."""
    ALL_ATTENTION_FUNCTIONS.register(_WHOLE, _attended)
    config._attn_implementation = _WHOLE


def _attended(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend, (B, H, S, D); the interface is that of transformers' functions."""
    attended = attention_node(query, key, value, attention_mask, float(scaling))
    return attended.transpose(1, 2).contiguous(), None
