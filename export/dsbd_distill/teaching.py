"""Teaching: the target on its device, tokens of the data, and held-out samples.

The tokens of all data are streams on disk: texts and chats, sources, or sound. Each line of a file
is a source: a text, or in a ``.jsonl`` file a string or an object with a field ``source`` or
``text``.
"""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from dsbd_distill.acceptance import MOST_HELD_OUT, HeldOutPrompts, prompt_length
from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.draft_model import feature_layers, feature_size
from dsbd_distill.given_sounds import Ask, GivenSounds, reads_sound, write_prompts
from dsbd_distill.sounds import Hear, SoundSources, T, open_windows, write_windows
from dsbd_distill.sources import (
    RowReader,
    SourceRowReader,
    SourceTeacher,
    SourceTokens,
    sources_of,
)
from dsbd_distill.teacher import (
    CHAT_SAMPLING,
    TEXT_SAMPLING,
    Teacher,
    TeacherFeatures,
    TorchDevice,
    best_device,
)
from dsbd_distill.work_folder import WorkFolder
from dsbd_export.capture.caches import probed_caches
from dsbd_export.chats import MOST_NEW, MOST_PROMPT, ChatTokens
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import json_object
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.encoder_decoder.checkpoint import with_languages
from dsbd_export.encoder_decoder.source import probed_sources
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.checkpoint import GivenCheckpoint
from dsbd_export.given_prompt.source import GivenPromptSource
from dsbd_export.progress import Counter, Report, counted
from dsbd_export.texts import (
    CHATS,
    SOURCES,
    WINDOWS,
    TextFile,
    TokenStreams,
    open_streams,
    opened_sinks,
    windows,
    write_streams,
)
from dsbd_export.tokenizers.tokenizer_files import write_tokenizer_files
from dsbd_runtime.bundle_files.bundle import GENERATION_CONFIG_FILE
from dsbd_runtime.text.tokenizer import Tokenizer

_NUM_PROMPTS = 256  # held-out prompts
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
    # reads prompts whose requests have a source; None: requests have no source
    reader: RowReader | None = None


def prepare_teaching(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
    hear: Hear | None = None,
    ask: Ask | None = None,
) -> Teaching:
    """Load the target and choose held-out prompts; raise ExportError if it cannot teach."""
    checkpoint = with_languages(checkpoint)
    streams = token_streams(config, checkpoint, files, work, report, hear, ask)
    device = best_device()
    report(f"loading the target on {device.name}{', products in bf16' * device.uses_bf16}")
    # An encoder stays in fp32: the draft can share it only if its weights are unchanged.
    if isinstance(checkpoint, GivenCheckpoint):
        target = GivenPromptSource(checkpoint).load("fp32", report)
    else:
        is_narrow = device.name == "cuda" and checkpoint.encoder is None
        target = load_model(checkpoint, "bf16" if is_narrow else "fp32", report)
    cache_bytes = _cache_bytes(checkpoint, target)
    target.requires_grad_(False).to(device.name)
    _check_teaches(target, checkpoint, device)
    reader = _reader(config, checkpoint, target, streams, work)
    size = checkpoint.vocab_size
    if not isinstance(reader, SourceRowReader):
        features = None
        if config.kind == FEATURE:
            features = TeacherFeatures(target, feature_layers(checkpoint), feature_size(checkpoint))
        teacher = Teacher(target, size, cache_bytes, device, features)
    else:
        teacher = SourceTeacher(target, size, cache_bytes, device, reader=reader)
    held_out = _held_out_prompts(config, checkpoint, streams, reader, teacher, work, report)
    return Teaching(checkpoint, target, teacher, streams, held_out, device, reader)


def learns_few_answers(config: DistillConfig, streams: TokenStreams) -> bool:
    """Return whether a draft learns quickly from few rows: a feature draft, from chats alone.

    It overfits to answers after few passes. So it sees each answer 8 times, and its embedding is
    not trained.
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
    config: DistillConfig,
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    streams: TokenStreams,
    work: WorkFolder,
) -> RowReader | None:
    if isinstance(checkpoint, GivenCheckpoint):
        prompts = (streams.train_prompts, streams.held_out_prompts)
        longest = max(int(np.diff(each.ends, prepend=0).max()) for each in prompts)
        return GivenSounds(target, checkpoint, work, longest)
    if checkpoint.encoder is None:
        return None
    if (speech := checkpoint.encoder.speech) is None:
        return SourceRowReader(target, len(target_begin(checkpoint)))
    features = open_windows(work.features, speech)
    return SoundSources(target, checkpoint, features, work.hidden_states, config)


def _held_out_prompts(
    config: DistillConfig,
    checkpoint: Checkpoint,
    streams: TokenStreams,
    reader: RowReader | None,
    teacher: Teacher,
    work: WorkFolder,
    report: Report,
) -> HeldOutPrompts:
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


MOST_SOURCE = 512  # tokens of a source, if the encoder reads as many
_LEFT_OUT = "are longer than {longest} tokens and are left out"


def token_streams(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: list[TextFile],
    work: WorkFolder,
    report: Report,
    hear: Hear | None,
    ask: Ask | None = None,
) -> TokenStreams:
    """Return the tokens of all data, stored before or now; raise ExportError for bad data."""
    encoder = checkpoint.encoder
    begin = target_begin(checkpoint) if encoder is not None and encoder.speech is None else []
    if not work.tokens.exists():
        kind = "reading {:,} files of audio" if reads_sound(checkpoint) else "tokenizing {:,} files"
        phase = kind.format(len(files))
        report(phase)
        remaining = counted(files, Counter(phase, "files", report))
        if isinstance(checkpoint, GivenCheckpoint):
            asked_of = _hearing(ask, checkpoint)(
                checkpoint.given,
                checkpoint.context_length,
                _tokenizer_folder(checkpoint, work, report),
                config.language,
                config.task,
            )
            write_prompts(remaining, asked_of, checkpoint, work)
        elif encoder is None:
            _write_texts(config, checkpoint, remaining, work, report)
        elif encoder.speech is None:
            _write_sources(checkpoint, remaining, begin, work, report)
        else:
            hear_windows = _hearing(hear, checkpoint)
            write_windows(remaining, hear_windows, encoder.speech, work.features, work.tokens)
    kind = CHATS if encoder is None else SOURCES
    return _opened_streams(work, WINDOWS if reads_sound(checkpoint) else kind, report)


def _hearing(given: T | None, checkpoint: Checkpoint) -> T:
    """Return the function that reads audio; raise ExportError without one."""
    if given is None:
        raise ExportError(
            f"the target at {checkpoint.folder} (family {checkpoint.family}) reads sound, and hear "
            "is missing, which reads audio; use dsbd-distill, or pass it"
        )
    return given


def _opened_streams(work: WorkFolder, kind: str, report: Report) -> TokenStreams:
    streams = open_streams(work.tokens, kind)
    if kind != CHATS and not streams.has_chats:
        wanted = "lines of text" if kind == SOURCES else "files of audio"
        raise ExportError(f"data contains no {kind}; give {wanted}")
    names = "prompts of chats" if kind == CHATS else kind
    parts: list[tuple[str, Sized, Sized]] = [
        ("tokens", streams.train, streams.held_out),
        (names, streams.train_prompts, streams.held_out_prompts),
    ]
    sizes = [
        f"{len(train):,} {name} to learn from, {len(held_out):,} held out"
        for name, train, held_out in parts
        if len(train)
    ]
    report(f"{'; '.join(sizes)}: {streams.split}")
    return streams


def _tokenizer_folder(checkpoint: Checkpoint, work: WorkFolder, report: Report) -> Path:
    folder = work.path / "tokenizer"
    folder.mkdir(exist_ok=True)
    write_tokenizer_files(checkpoint, folder, report)
    return folder


def _write_texts(
    config: DistillConfig,
    checkpoint: Checkpoint,
    files: Iterable[TextFile],
    work: WorkFolder,
    report: Report,
) -> None:
    folder = _tokenizer_folder(checkpoint, work, report)
    tokenizer = Tokenizer(folder, bos_token_id=checkpoint.bos_token_id)
    eos = checkpoint.eos_token_ids[0] if checkpoint.eos_token_ids else None
    room = min(MOST_NEW, checkpoint.context_length // 2)
    longest = min(MOST_PROMPT, checkpoint.context_length - room)
    chats = ChatTokens(folder, tokenizer, longest=longest, learns_answers=config.learn_answers)
    write_streams(files, tokenizer, chats, eos, work.tokens)
    if chats.num_left_out:
        what = _LEFT_OUT.format(longest=longest)
        report(f"warning: {chats.num_left_out:,} prompts of chats {what}")


def _write_sources(
    checkpoint: Checkpoint,
    files: Iterable[TextFile],
    begin: list[int],
    work: WorkFolder,
    report: Report,
) -> None:
    """Write all sources, each followed by ``begin``, the tokens that every target begins with."""
    assert checkpoint.encoder is not None  # the caller has asked
    longest = min(MOST_SOURCE, checkpoint.encoder.context_length)
    reader = SourceTokens(_tokenizer_folder(checkpoint, work, report), checkpoint, longest)
    with opened_sinks(work.tokens) as sink_of:
        for file in files:
            for name, text in sources_of(file):
                if ids := reader.token_ids(text):
                    sink_of(name).write_prompt([*ids, *begin])
    if reader.num_left_out:
        report(f"warning: {reader.num_left_out:,} sources {_LEFT_OUT.format(longest=longest)}")


def target_begin(checkpoint: Checkpoint) -> list[int]:
    """Return the tokens that targets begin with; ExportError if their language is not fixed."""
    encoder = checkpoint.encoder
    assert encoder is not None  # the caller has asked
    file, name = checkpoint.folder / GENERATION_CONFIG_FILE, "forced_bos_token_id"
    content = json_object(file) if file.is_file() else {}
    forced = content.get(name, getattr(checkpoint.config, name, None))
    if forced is not None:
        return [encoder.start_token_id, int(forced)]
    if encoder.languages is not None:
        raise ExportError(
            f"the target at {checkpoint.folder} (family {checkpoint.family}) translates between "
            f"{len(encoder.languages)} languages, and its generation_config.json has no {name}: a "
            "draft is trained for one language of targets; write its token there"
        )
    return [encoder.start_token_id]
