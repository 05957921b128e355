"""Teaching: the target on its device, tokens of the data, and held-out samples."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from dsbd_distill.acceptance import MOST_HELD_OUT, HeldOutPrompts, prompt_length
from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.feature_shape import feature_layers, feature_size
from dsbd_distill.sounds import Hear, SoundSources, open_windows
from dsbd_distill.sources import SourceRowReader, SourceTeacher
from dsbd_distill.teacher import (
    CHAT_SAMPLING,
    TEXT_SAMPLING,
    Teacher,
    TeacherFeatures,
    TorchDevice,
    best_device,
)
from dsbd_distill.token_streams import target_begin, token_streams
from dsbd_distill.work_folder import WorkFolder
from dsbd_export.capture.cache_probe import probed_caches
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.encoder_decoder.checkpoint import with_languages
from dsbd_export.encoder_decoder.reference import probed_sources
from dsbd_export.errors import ExportError
from dsbd_export.progress import Report
from dsbd_export.texts import TextFile, TokenStreams, windows

_NUM_PROMPTS = 256  # held out
_BYTES_PER_NUMBER = 4  # in fp32, the widest


@dataclass(frozen=True)
class Teaching:
    """The parts of a training that do not depend on the kind of draft."""

    checkpoint: Checkpoint
    target: PreTrainedModel
    teacher: Teacher
    streams: TokenStreams
    held_out: HeldOutPrompts
    device: TorchDevice
    # of the sources of rows; None unless the target is an encoder-decoder
    reader: SourceRowReader | None = None


def prepare_teaching(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
    hear: Hear | None = None,
) -> Teaching:
    """Load the target and choose held-out prompts; raise ExportError if it cannot teach."""
    checkpoint = with_languages(checkpoint)
    streams = token_streams(config, checkpoint, files, work, report, hear)
    device = best_device()
    report(f"loading the target on {device.name}{', products in bf16' * device.uses_bf16}")
    # An encoder stays in fp32: the draft has its weights as they are, or could not share it.
    is_narrow = device.name == "cuda" and checkpoint.encoder is None
    target = load_model(checkpoint, "bf16" if is_narrow else "fp32", report)
    cache_bytes = _cache_bytes(checkpoint, target)
    target.requires_grad_(False).to(device.name)
    _check_teaches(target, checkpoint, device)
    reader = None if checkpoint.encoder is None else _reader(config, checkpoint, target, work)
    size = checkpoint.vocab_size
    if reader is None:
        features = None
        if config.kind == FEATURE:
            features = TeacherFeatures(target, feature_layers(checkpoint), feature_size(checkpoint))
        teacher = Teacher(target, size, cache_bytes, device, features)
    else:
        teacher = SourceTeacher(target, size, cache_bytes, device, reader)
    held_out = _held_out_prompts(config, checkpoint, streams, reader, teacher, work, report)
    return Teaching(checkpoint, target, teacher, streams, held_out, device, reader)


def learns_few_answers(config: DistillConfig, streams: TokenStreams) -> bool:
    """Return whether a draft learns quickly from few rows: a feature draft, from chats alone.

    It learns answers by heart after few passes, so it learns each 8 times and keeps its embedding.
    """
    return config.kind == FEATURE and streams.has_chats and not streams.has_texts


def _cache_bytes(checkpoint: Checkpoint, target: PreTrainedModel) -> int:
    if checkpoint.encoder is None:
        rows = [*probed_caches(target, checkpoint, "fp32")]
    else:
        probed = probed_sources(target, checkpoint, "fp32")
        assert probed.encoder is not None
        rows = [*probed.caches, *probed.encoder.cross]
    return _BYTES_PER_NUMBER * sum(each.numbers_a_row for each in rows)


def _reader(
    config: DistillConfig, checkpoint: Checkpoint, target: PreTrainedModel, work: WorkFolder
) -> SourceRowReader:
    assert checkpoint.encoder is not None  # the caller has asked
    if (speech := checkpoint.encoder.speech) is None:
        return SourceRowReader(target, len(target_begin(checkpoint)))
    features = open_windows(work.features, speech)
    return SoundSources(target, checkpoint, features, work.hidden_states, config)


def _held_out_prompts(
    config: DistillConfig,
    checkpoint: Checkpoint,
    streams: TokenStreams,
    reader: SourceRowReader | None,
    teacher: Teacher,
    work: WorkFolder,
    report: Report,
) -> HeldOutPrompts:
    """Return held-out prompts: of chats or sources if there are any."""
    rng = np.random.default_rng((config.seed, 2))
    context = checkpoint.context_length
    if streams.has_chats:
        prompts = streams.held_out_prompts.chosen(_NUM_PROMPTS, rng)
        room = context // 2 if reader is None else context - reader.most_begin
        sampling, num_new = CHAT_SAMPLING, min(MOST_HELD_OUT, room)
    else:
        num_new = prompt_length(context, len(streams.held_out))
        prompts = [*windows(streams.held_out, _NUM_PROMPTS, num_new, rng)]
        sampling = TEXT_SAMPLING
    return HeldOutPrompts(
        prompts=prompts,
        sampling=sampling,
        num_new=num_new,
        ends=checkpoint.eos_token_ids if streams.has_chats else (),
        folder=work.held_out,
        teacher=teacher.exact(),  # compared with the target, not with its rounding
        seed=config.seed,
        report=report,
    )


@torch.inference_mode()
def _check_teaches(target: PreTrainedModel, checkpoint: Checkpoint, device: TorchDevice) -> None:
    """Raise ExportError unless logits are finite and independent of later tokens."""
    tokens = torch.arange(8, device=device.name).remainder(checkpoint.vocab_size).repeat(2, 1)
    tokens[1, -1] = checkpoint.vocab_size - 1
    encoder = checkpoint.encoder
    if encoder is None:
        given = {"input_ids": tokens}
    elif (speech := encoder.speech) is None:
        given = {"input_ids": tokens[:1], "decoder_input_ids": tokens[:1, :2]}
    else:
        silence = torch.zeros(1, speech.num_mels, speech.num_frames, device=device.name)
        given = {"input_features": silence, "decoder_input_ids": tokens[:1, :2]}
    logits = target(**given, use_cache=False).logits[:, :-1].float()
    if not torch.isfinite(logits).all():
        raise ExportError(
            f"the target at {checkpoint.folder} has logits that are not finite; check its weights"
        )
    if not torch.allclose(logits[0], logits[-1], rtol=1e-2, atol=1e-2):
        raise ExportError(
            f"the target at {checkpoint.folder} (family {checkpoint.family}) is no causal language "
            "model: its logits depend on later tokens; choose a decoder that continues text"
        )
