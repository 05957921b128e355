"""Caches and cases of an encoder-decoder, and whether a draft shares the target's encoder."""

import dataclasses
import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from dsbd_export.capture.cache_probe import RecordingCache, attention_rows
from dsbd_export.capture.source_attention import has_distance_bias
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.errors import ExportError
from dsbd_export.parity_cases import (
    TREE,
    ForestCase,
    forest_cases,
    num_drawn,
    text_case,
)
from dsbd_export.parts.sources import entry_of, heard_sounds
from dsbd_export.wider_precision import ComputeIn
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


_SOURCE_LENGTHS = (1, 9, 40, 150)  # the last is beyond the distances that biases distinguish
_NUM_TOKENS = 3  # of the probed source; the target has two, so that they differ


def probed_sources(model: PreTrainedModel, checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Return the checkpoint with its caches and cross rows; raise ExportError for other caches."""
    encoder = entry_of(checkpoint)
    own, cross = RecordingCache(), RecordingCache()
    source, num_rows = {"input_ids": torch.arange(_NUM_TOKENS)[None]}, _NUM_TOKENS
    if (speech := encoder.speech) is not None:
        source = {"input_features": torch.zeros(1, speech.num_mels, speech.num_frames)}
        num_rows = speech.num_positions
    with torch.no_grad(), quiet_libraries(), ComputeIn(torch.float32):
        model(
            **source,
            decoder_input_ids=torch.zeros(1, 2, dtype=torch.int64),
            use_cache=True,
            **{cache_name(model): EncoderDecoderCache(own, cross)},
        )
    if not own.rows or not cross.rows:
        raise ExportError(
            f"the {checkpoint.role} (family {checkpoint.family}) stores no keys and values in a "
            "cache, for its tokens or its source; choose another checkpoint"
        )
    found = attention_rows(cross, checkpoint, dtype, num_rows)
    by_layer = sorted(found, key=lambda rows: rows.layer)
    known = replace(encoder, cross=by_layer, reads_positions=has_distance_bias(model))
    known = with_hidden_states(model, checkpoint, known)
    caches = sorted(attention_rows(own, checkpoint, dtype, 2), key=lambda rows: rows.layer)
    return replace(checkpoint, caches=tuple(caches), encoder=known)


def source_cases(checkpoint: Checkpoint) -> list[ForestCase]:
    """Return the forests with sources of several lengths, alone and together, and the text."""
    if (speech := entry_of(checkpoint).speech) is not None:
        forests = [*forest_cases(checkpoint), text_case(checkpoint)]
        sounds = heard_sounds(speech)
        return [
            dataclasses.replace(case, sound=sounds[index * len(sounds) // len(forests)])
            for index, case in enumerate(forests)
        ]
    rng = np.random.default_rng(1)
    num_tokens = min(entry_of(checkpoint).vocab_size, num_drawn(checkpoint))
    cases = []
    for index, case in enumerate(forest_cases(checkpoint)):
        length = _SOURCE_LENGTHS[index % len(_SOURCE_LENGTHS)]
        source = rng.integers(0, num_tokens, length, dtype=np.int64)
        cases.append(_with_source(case, source, checkpoint))
    first, *others = (case for case in cases if case.name == TREE)
    together = dataclasses.replace(first, name="sources", together=tuple(others))
    text = text_case(checkpoint)
    return [*cases, together, with_own_source(text, checkpoint)]


def with_own_source(case: ForestCase, checkpoint: Checkpoint) -> ForestCase:
    """Return a case whose source is its own text, or of a speech model a sound."""
    if (speech := entry_of(checkpoint).speech) is not None:
        return dataclasses.replace(case, sound=heard_sounds(speech)[1])
    return _with_source(case, case.node_ids, checkpoint)


def _with_source(
    case: ForestCase, source_ids: NDArray[np.int64], checkpoint: Checkpoint
) -> ForestCase:
    """Return a case with a source, both without padding: no request has padding in its source."""
    padding = checkpoint.config.pad_token_id
    other = 0 if padding != 0 else 1
    source = source_ids[: entry_of(checkpoint).context_length]
    return dataclasses.replace(
        case,
        source_ids=np.where(source == padding, other, source),
        prefix_ids=np.where(case.prefix_ids == padding, other, case.prefix_ids),
        node_ids=np.where(case.node_ids == padding, other, case.node_ids),
    )
