"""Drafts with the target's encoder: recognized by weights and config, exported without it."""

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
"""Fields of a config that hidden states of an encoder do not depend on: of the decoder, of the
training, of outputs, of requests. Unknown fields are compared."""


def with_hidden_states(
    model: PreTrainedModel, checkpoint: Checkpoint, encoder: EncoderEntry
) -> EncoderEntry:
    """Return the entry of an encoder that returns hidden states, or shares the target's."""
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
    """Return the sha256 (hex) of an encoder's config and weights, which are hashed in fp32."""
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
