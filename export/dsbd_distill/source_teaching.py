"""What a draft of an encoder-decoder is trained with: target, sources as tokens, held-out ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from transformers import PreTrainedModel

from dsbd_distill.acceptance import MOST_HELD_OUT, HeldOutPrompts
from dsbd_distill.config import DistillConfig
from dsbd_distill.sounds import Hear, SoundSources, open_windows, write_windows
from dsbd_distill.source_teacher import SourceTeacher
from dsbd_distill.sources import (
    MOST_SOURCE,
    SourceRowReader,
    SourceTokens,
    TextSources,
    target_begin,
    write_sources,
)
from dsbd_distill.teacher import CHAT_SAMPLING, TorchDevice, best_device
from dsbd_distill.teaching import BYTES_PER_NUMBER, NUM_PROMPTS, Teaching
from dsbd_distill.work_folder import WorkFolder
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.encoder_decoder.languages import with_languages
from dsbd_export.encoder_decoder.reference import probed_sources
from dsbd_export.errors import ExportError
from dsbd_export.progress import Counter, Report, counted
from dsbd_export.texts import SOURCES, WINDOWS, TextFile, TokenStreams, open_streams
from dsbd_export.tokenizers.tokenizer_files import write_tokenizer_files
from dsbd_runtime.parts.speech_entry import SpeechEntry


def prepare_source_teaching(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
    hear: Hear | None = None,
) -> Teaching:
    """Read the sources, load the target and choose held-out sources.

    hear: reads audio, for a target that reads sound.

    Raises:
        ExportError: the sources are too few, or the target's weights are not finite.
    """
    checkpoint = with_languages(checkpoint)
    assert checkpoint.encoder is not None  # the caller has asked
    speech = checkpoint.encoder.speech
    begin = [] if speech is not None else target_begin(checkpoint)
    if speech is not None:
        streams = _window_streams(checkpoint, speech, files, work, report, hear)
    else:
        streams = _text_streams(checkpoint, begin, files, work, report)
    device = best_device()
    report(f"loading the target on {device.name}{', products in bf16' * device.uses_bf16}")
    # In fp32 everywhere: the draft has the encoder's weights as they are, or it could not share it.
    target = load_model(checkpoint, "fp32", report)
    probed = probed_sources(target, checkpoint, "fp32")
    target.requires_grad_(False).to(device.name)
    _check_finite(target, checkpoint, device)
    assert probed.encoder is not None
    rows = [*probed.caches, *probed.encoder.cross]
    cache_bytes = BYTES_PER_NUMBER * sum(each.numbers_a_row for each in rows)
    size = checkpoint.vocab_size
    reader: SourceRowReader
    if speech is not None:
        features = open_windows(work.features, speech)
        reader = SoundSources(target, checkpoint, features, work.hidden_states, config)
    else:
        reader = TextSources(target, len(begin))
    exact = dataclasses.replace(device, uses_bf16=False)
    held_out = HeldOutPrompts(
        prompts=streams.held_out_prompts.chosen(
            NUM_PROMPTS, np.random.default_rng((config.seed, 2))
        ),
        sampling=CHAT_SAMPLING,
        num_new=min(MOST_HELD_OUT, checkpoint.context_length - reader.most_begin),
        ends=checkpoint.eos_token_ids,
        folder=work.held_out,
        teacher=SourceTeacher(target, size, cache_bytes, exact, reader),
        seed=config.seed,
        report=report,
    )
    teacher = SourceTeacher(target, size, cache_bytes, device, reader)
    return Teaching(checkpoint, target, teacher, streams, held_out, device, reader)


def _text_streams(
    checkpoint: Checkpoint,
    begin: list[int],
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
) -> TokenStreams:
    """Return the tokens of all sources, which an earlier run may have left."""
    assert checkpoint.encoder is not None  # the caller has asked
    if not work.tokens.exists():
        phase = f"tokenizing {len(files):,} files"
        report(phase)
        folder = work.path / "tokenizer"
        folder.mkdir(exist_ok=True)
        write_tokenizer_files(checkpoint, folder, report)
        longest = min(MOST_SOURCE, checkpoint.encoder.context_length)
        reader = SourceTokens(folder, checkpoint, longest)
        write_sources(counted(files, Counter(phase, "files", report)), reader, begin, work.tokens)
        if reader.num_left_out:
            report(
                f"warning: {reader.num_left_out:,} sources are longer than {longest} tokens and "
                "are left out"
            )
    return _opened(work, SOURCES, "lines of text", report)


def _window_streams(
    checkpoint: Checkpoint,
    speech: SpeechEntry,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
    hear: Hear | None,
) -> TokenStreams:
    """Return the numbers of all windows of sound, which an earlier run may have left."""
    if not work.tokens.exists():
        if hear is None:
            raise ExportError(
                f"the target at {checkpoint.folder} (family {checkpoint.family}) reads sound, and "
                "hear is missing, which reads audio; use dsbd-distill, or pass it"
            )
        phase = f"reading {len(files):,} files of audio"
        report(phase)
        counted_files = counted(files, Counter(phase, "files", report))
        write_windows(counted_files, hear, speech, work.features, work.tokens)
    return _opened(work, WINDOWS, "files of audio", report)


def _opened(work: WorkFolder, kind: str, wanted: str, report: Report) -> TokenStreams:
    """Return the sources that were written, and report how many there are."""
    streams = open_streams(work.tokens, kind)
    if not len(streams.train_prompts):
        raise ExportError(f"data has none of the {kind} that are needed; give {wanted}")
    report(
        f"{len(streams.train_prompts):,} {kind} to learn from, "
        f"{len(streams.held_out_prompts):,} held out: {streams.split}"
    )
    return streams


@torch.inference_mode()
def _check_finite(target: PreTrainedModel, checkpoint: Checkpoint, device: TorchDevice) -> None:
    tokens = torch.arange(8, device=device.name).remainder(checkpoint.vocab_size)[None]
    source = {"input_ids": tokens}
    if checkpoint.encoder is not None and (speech := checkpoint.encoder.speech) is not None:
        silence = torch.zeros(1, speech.num_mels, speech.num_frames, device=device.name)
        source = {"input_features": silence}
    logits = target(**source, decoder_input_ids=tokens[:, :2], use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ExportError(
            f"the target at {checkpoint.folder} has logits that are not finite; check its weights"
        )
