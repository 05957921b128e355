"""Drafts whose encoder is the target's: known by its weights and config, exported without it.

Such a draft is a decoder alone, as distil-whisper's or one that ``dsbd-distill`` has trained: its
cross rows are products with hidden states that the target's encoder leaves anyway.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_runtime.parts.encoder_entry import EncoderEntry

_OF_OTHERS = re.compile(
    r"_name_or_path|architectures|transformers_version|(torch_)?dtype|.*init.*|.*drop.*"
    r"|(decoder|forced)_.*|num_decoder_layers|num_hidden_layers|scale_decoder_outputs"
    r"|.*vocab_size|.*_token_id|tie_word_embeddings|share_encoder_decoder_embeddings"
    r"|is_decoder|is_encoder_decoder|use_cache|return_dict|output_.*|chunk_size_feed_forward"
    r"|id2label|label2id|num_labels|problem_type|task_specific_params|max_length|num_beams"
)
"""Fields of a config that no hidden state of an encoder depends on, besides by its weights: of the
decoder, of the training, of outputs, of requests. A field that is not known counts."""


def with_hidden_states(
    model: PreTrainedModel, checkpoint: Checkpoint, encoder: EncoderEntry
) -> EncoderEntry:
    """Return the entry of an encoder whose graph returns hidden states or reads the target's.

    A target's returns them: a draft that shares it may be added later. A draft's reads them where
    it is the same, and does neither where it is another.

    encoder: that of the checkpoint, whose model this is.
    """
    own = fingerprint(model)
    width = int(model.config.hidden_size)
    if checkpoint.role == "target":
        return replace(encoder, hidden_width=width, fingerprint=own)
    target = checkpoint.target_encoder
    if target is None or target.fingerprint != own:
        return encoder
    return replace(
        encoder,
        hidden_width=width,
        is_shared=True,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
    )


def fingerprint(model: PreTrainedModel) -> str:
    """Return the sha256 (hex) of what the hidden states of a model's encoder follow from.

    Weights count in fp32, which holds those of any type as they are.
    """
    encoder = model.get_encoder()
    digest = hashlib.sha256()
    content = {
        name: value
        for name, value in model.config.to_dict().items()
        if not _OF_OTHERS.fullmatch(name)
    }
    digest.update(json.dumps(content, sort_keys=True, default=repr).encode())
    for name, weight in sorted(encoder.state_dict().items()):
        numbers = weight.detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(f"{name} {numbers.shape} ".encode())
        digest.update(memoryview(numbers).cast("B"))
    return digest.hexdigest()
