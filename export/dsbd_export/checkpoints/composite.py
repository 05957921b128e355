"""Composite models: the text part in its wrapper, without parts for pictures or sound.

The wrapper's own forward is captured: it may scale logits (Cohere2-Vision), give positions in rows
for time, height and width (Qwen-VL), or have no text class.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dsbd_export.errors import ExportError

_KIND_BY_WORD = {  # in the name of a part's config
    "vision": "image",
    "vit": "image",
    "image": "image",
    "video": "image",
    "audio": "audio",
    "speech": "audio",
    "encoder": "audio",
}


class AbsentPart(nn.Module):
    """An omitted part of a composite model, which text never reaches."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise ExportError."""
        raise ExportError(
            f"the model calls its part {self._name!r} for text alone, but the export omits this "
            "part; the family is not supported, choose another checkpoint"
        )


def unread_inputs(composite: PreTrainedConfig, text: PreTrainedConfig) -> list[str]:
    """Return kinds of input that only other parts read: "image", "audio", or a part's name."""
    names = [name for name in composite.sub_configs if getattr(composite, name, None) is not text]
    found = set()
    for name in names:
        kinds = [kind for word, kind in _KIND_BY_WORD.items() if word in name]
        found.add(kinds[0] if kinds else name.removesuffix("_config"))
    return sorted(found)


def keep_text_part(model: PreTrainedModel) -> None:
    """Replace all parts except decoder and head, in place; raise ExportError without a decoder."""
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        raise ExportError(
            f"{type(model).__name__} has no text decoder of its own (get_decoder); choose "
            "another checkpoint"
        )
    kept = [decoder, model.get_output_embeddings()]
    _leave_out(model, [part for part in kept if part is not None])


def _leave_out(module: nn.Module, kept: list[nn.Module]) -> None:
    for name, child in list(module.named_children()):
        if any(child is part for part in kept):
            continue
        inside = set(child.modules())
        if any(part in inside for part in kept):
            _leave_out(child, kept)
        elif any(True for _ in child.parameters()):
            setattr(module, name, AbsentPart(name))
