"""What a draft is trained with: the target on its device, tokens of the texts, held-out samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from dsbd_distill.acceptance import MOST_HELD_OUT, HeldOutPrompts, prompt_length
from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.feature_shape import feature_layers, feature_size
from dsbd_distill.sources import SourceRowReader
from dsbd_distill.teacher import (
    CHAT_SAMPLING,
    TEXT_SAMPLING,
    Teacher,
    TorchDevice,
    best_device,
)
from dsbd_distill.teacher_features import TeacherFeatures
from dsbd_distill.work_folder import WorkFolder
from dsbd_export.capture.cache_probe import probed_caches
from dsbd_export.chats import MOST_NEW, MOST_PROMPT, ChatTokens
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.errors import ExportError
from dsbd_export.progress import Counter, Report, counted
from dsbd_export.texts import (
    TextFile,
    TokenStreams,
    open_streams,
    windows,
    write_streams,
)
from dsbd_export.tokenizers.tokenizer_files import write_tokenizer_files
from dsbd_runtime.text.tokenizer import Tokenizer

NUM_PROMPTS = 256  # held out
BYTES_PER_NUMBER = 4  # in fp32, the widest


@dataclass(frozen=True)
class Teaching:
    """What a draft is trained with.

    Attributes:
        held_out: prompts, with the target's samples behind them.
        teacher: the target in the precision of the training.
        reader: of an encoder-decoder, what reads the sources of rows; None of any other.
    """

    checkpoint: Checkpoint
    target: PreTrainedModel
    teacher: Teacher
    streams: TokenStreams
    held_out: HeldOutPrompts
    device: TorchDevice
    reader: SourceRowReader | None = None


def prepare_teaching(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
) -> Teaching:
    """Read the texts, load the target and choose held-out prompts.

    Raises:
        ExportError: the texts are too few, or the target is no causal language model.
    """
    streams = _streams(config, checkpoint, files, work, report)
    device = best_device()
    report(f"loading the target on {device.name}{', products in bf16' * device.uses_bf16}")
    target = load_model(checkpoint, "bf16" if device.name == "cuda" else "fp32", report)
    target.requires_grad_(False).to(device.name)
    _check_causal(target, checkpoint, device)
    caches = probed_caches(target, checkpoint, "fp32")
    cache_bytes = BYTES_PER_NUMBER * sum(cache.numbers_a_row for cache in caches)
    features = None
    if config.kind == FEATURE:
        features = TeacherFeatures(target, feature_layers(checkpoint), feature_size(checkpoint))
    teacher = Teacher(target, checkpoint.vocab_size, cache_bytes, device, features)
    # In fp32: acceptance is measured against the target, not against its rounding.
    exact = dataclasses.replace(device, uses_bf16=False)
    held_out = _held_out_prompts(config, checkpoint, streams)(
        folder=work.held_out,
        teacher=Teacher(target, checkpoint.vocab_size, cache_bytes, exact, features),
        seed=config.seed,
        report=report,
    )
    return Teaching(checkpoint, target, teacher, streams, held_out, device)


def learns_few_answers(config: DistillConfig, streams: TokenStreams) -> bool:
    """Return whether a draft learns quickly from rows of which there are few: features, of chats.

    A feature draft learns answers by heart long before it has seen many: of 128, each 24 times, the
    loss was 0.4 where 0.38 of held-out places were accepted. So it learns an answer 8 times, and
    keeps its embedding: one gradient moves a rare token's row by as much as what the row says.
    """
    return config.kind == FEATURE and streams.has_chats and not streams.has_texts


def _held_out_prompts(
    config: DistillConfig, checkpoint: Checkpoint, streams: TokenStreams
) -> Callable[..., HeldOutPrompts]:
    """Return held-out prompts, of chats where there are some, without their teacher."""
    rng = np.random.default_rng((config.seed, 2))
    if streams.has_chats:
        return functools.partial(
            HeldOutPrompts,
            prompts=streams.held_out_prompts.chosen(NUM_PROMPTS, rng),
            sampling=CHAT_SAMPLING,
            num_new=min(MOST_HELD_OUT, checkpoint.context_length // 2),
            ends=checkpoint.eos_token_ids,
        )
    length = prompt_length(checkpoint.context_length, len(streams.held_out))
    return functools.partial(
        HeldOutPrompts,
        prompts=[*windows(streams.held_out, NUM_PROMPTS, length, rng)],
        sampling=TEXT_SAMPLING,
        num_new=length,
        ends=(),
    )


def _streams(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
) -> TokenStreams:
    """Return the tokens of all texts, which an earlier run may have left."""
    if not work.tokens.exists():
        phase = f"tokenizing {len(files):,} files"
        report(phase)
        folder = work.path / "tokenizer"
        folder.mkdir(exist_ok=True)
        write_tokenizer_files(checkpoint, folder, report)
        tokenizer = Tokenizer(folder, bos_token_id=checkpoint.bos_token_id)
        eos = checkpoint.eos_token_ids[0] if checkpoint.eos_token_ids else None
        room = min(MOST_NEW, checkpoint.context_length // 2)
        chats = ChatTokens(
            folder,
            tokenizer,
            longest=min(MOST_PROMPT, checkpoint.context_length - room),
            learns_answers=config.learn_answers,
        )
        counted_files = counted(files, Counter(phase, "files", report))
        write_streams(counted_files, tokenizer, chats, eos, work.tokens)
        if chats.num_left_out:
            report(
                f"warning: {chats.num_left_out:,} prompts of chats are longer than {chats.longest} "
                "tokens and are left out"
            )
    streams = open_streams(work.tokens)
    report(f"{_sizes(streams)}: {streams.split}")
    return streams


def _sizes(streams: TokenStreams) -> str:
    """Return how much there is to learn from and held out, in words."""
    texts = f"{len(streams.train):,} tokens to learn from, {len(streams.held_out):,} held out"
    prompts = (
        f"{len(streams.train_prompts):,} prompts of chats to learn from, "
        f"{len(streams.held_out_prompts):,} held out"
    )
    shown = {texts: streams.has_texts, prompts: streams.has_chats}
    return "; ".join(text for text, is_shown in shown.items() if is_shown)


@torch.inference_mode()
def _check_causal(target: PreTrainedModel, checkpoint: Checkpoint, device: TorchDevice) -> None:
    """Raise ExportError unless the logits behind a token are independent of later ones."""
    tokens = torch.arange(8, device=device.name).remainder(checkpoint.vocab_size).repeat(2, 1)
    tokens[1, -1] = checkpoint.vocab_size - 1
    logits = target(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    if not torch.isfinite(logits).all():
        raise ExportError(
            f"the target at {checkpoint.folder} has logits that are not finite; check its weights"
        )
    if not torch.allclose(logits[0], logits[1], rtol=1e-2, atol=1e-2):
        raise ExportError(
            f"the target at {checkpoint.folder} (family {checkpoint.family}) is no causal language "
            "model: its logits depend on later tokens; choose a decoder that continues text"
        )
