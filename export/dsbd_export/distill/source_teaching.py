"""What a draft of an encoder-decoder is trained with: target, tokens of sources, held-out ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from transformers import PreTrainedModel

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.distill.acceptance import MOST_HELD_OUT, HeldOutPrompts
from dsbd_export.distill.config import DistillConfig
from dsbd_export.distill.source_teacher import SourceTeacher
from dsbd_export.distill.sources import (
    MOST_SOURCE,
    SourceTokens,
    target_begin,
    write_sources,
)
from dsbd_export.distill.teacher import CHAT_SAMPLING, TorchDevice, best_device
from dsbd_export.distill.teaching import BYTES_PER_NUMBER, NUM_PROMPTS, Teaching
from dsbd_export.distill.texts import SOURCES, TextFile, TokenStreams, open_streams
from dsbd_export.distill.work_folder import WorkFolder
from dsbd_export.encoder_decoder.languages import with_languages
from dsbd_export.encoder_decoder.reference import probed_sources
from dsbd_export.errors import ExportError
from dsbd_export.model_loading import load_model
from dsbd_export.progress import Report
from dsbd_export.tokenizer_files import write_tokenizer_files


def prepare_source_teaching(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
) -> Teaching:
    """Read the sources, load the target and choose held-out sources.

    Raises:
        ExportError: the sources are too few, or the target's weights are not finite.
    """
    checkpoint = with_languages(checkpoint)
    begin = target_begin(checkpoint)
    streams = _streams(checkpoint, begin, files, work, report)
    device = best_device()
    report(f"loading the target on {device.name}{', products in bf16' * device.uses_bf16}")
    # In fp32 everywhere: the draft has the encoder's weights as they are, or it could not share it.
    target = load_model(checkpoint, "fp32")
    probed = probed_sources(target, checkpoint, "fp32")
    target.requires_grad_(False).to(device.name)
    _check_finite(target, checkpoint, device)
    assert probed.encoder is not None
    rows = [*probed.caches, *probed.encoder.cross]
    cache_bytes = BYTES_PER_NUMBER * sum(each.numbers_a_row for each in rows)
    size = checkpoint.vocab_size
    exact = dataclasses.replace(device, uses_bf16=False)
    held_out = HeldOutPrompts(
        prompts=streams.held_out_prompts.chosen(
            NUM_PROMPTS, np.random.default_rng((config.seed, 2))
        ),
        sampling=CHAT_SAMPLING,
        num_new=min(MOST_HELD_OUT, checkpoint.context_length - len(begin)),
        ends=checkpoint.eos_token_ids,
        folder=work.held_out,
        teacher=SourceTeacher(target, size, cache_bytes, exact, len(begin)),
        seed=config.seed,
        report=report,
    )
    teacher = SourceTeacher(target, size, cache_bytes, device, len(begin))
    return Teaching(checkpoint, target, teacher, streams, held_out, device, len(begin))


def _streams(
    checkpoint: Checkpoint,
    begin: list[int],
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
) -> TokenStreams:
    """Return the tokens of all sources, which an earlier run may have left."""
    assert checkpoint.encoder is not None  # the caller has asked
    if not work.tokens.exists():
        report(f"tokenizing {len(files):,} files")
        folder = work.path / "tokenizer"
        folder.mkdir(exist_ok=True)
        write_tokenizer_files(checkpoint, folder, report)
        longest = min(MOST_SOURCE, checkpoint.encoder.context_length)
        reader = SourceTokens(folder, checkpoint, longest)
        write_sources(files, reader, begin, work.tokens)
        if reader.num_left_out:
            report(
                f"warning: {reader.num_left_out:,} sources are longer than {longest} tokens and "
                "are left out"
            )
    streams = open_streams(work.tokens, SOURCES)
    if not len(streams.train_prompts):
        raise ExportError("data has no source; give lines of text")
    report(
        f"{len(streams.train_prompts):,} sources to learn from, "
        f"{len(streams.held_out_prompts):,} held out: {streams.split}"
    )
    return streams


@torch.inference_mode()
def _check_finite(target: PreTrainedModel, checkpoint: Checkpoint, device: TorchDevice) -> None:
    tokens = torch.arange(8, device=device.name).remainder(checkpoint.vocab_size)[None]
    logits = target(input_ids=tokens, decoder_input_ids=tokens[:, :2], use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ExportError(
            f"the target at {checkpoint.folder} has logits that are not finite; check its weights"
        )
