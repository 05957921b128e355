"""Encoders of media: attention among all rows of a segment, and rows by the model's own code.

transformers passes packed segments unchanged to an attention function with "flash" in its name. For
other functions it reads the segments' lengths, which a graph cannot express. An encoder's graph has
one segment: a window of sound, a picture or a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dsbd_export.capture.replacements import attention_node

_WHOLE = "flash-whole"


def attend_to_all(config: PreTrainedConfig) -> None:
    """Make the modules with this config (an encoder's) attend among all of their rows."""
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
    outputs = attended(query, key, value, attention_mask, float(scaling))
    return outputs.transpose(1, 2).contiguous(), None


def attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return (B, H, S, D): one node during a capture, otherwise computed by torch."""
    if torch.compiler.is_exporting():
        return attention_node(query, key, value, mask, scale)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def weights_of_encoder(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model by name, without the weights of its language model."""
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_text = tuple(f"{name}." for name, module in model.named_modules() if module in text)
    weights = model.state_dict()
    return {name: weight for name, weight in weights.items() if not name.startswith(of_text)}


def embedded(model: Any, token_ids: Tensor, placeholder: int, read_as: int | None) -> Tensor:
    """Return the embeddings of tokens; a generated placeholder is read as ``read_as``, if any."""
    if read_as is not None:
        token_ids = torch.where(token_ids == placeholder, read_as, token_ids)
    embeddings: Tensor = model.get_input_embeddings()(token_ids)
    return embeddings


def own_rows(model: Any, arguments: Mapping[str, Tensor]) -> Tensor:
    """See GivenKind."""
    is_picture = "pixel_values" in arguments
    features = model.get_image_features if is_picture else model.get_audio_features
    output = features(**arguments, return_dict=True)
    parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    width = parts[0][0].shape[-1]  # of rows, or of each picture's rows
    return torch.cat([torch.cat([e.reshape(-1, width) for e in part]) for part in parts], dim=1)
