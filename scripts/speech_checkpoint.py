"""A tiny random Whisper, with the special tokens, lists and settings of a real one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import WhisperConfig

from scripts.family_checkpoints import write_checkpoint

SAMPLING_RATE = 16_000
NUM_MELS = 16
CHUNK_SECONDS = 1
NUM_POSITIONS = CHUNK_SECONDS * 50
CONTEXT = 96
_TEXTS = ("The quick brown fox says that he heard the other one.", "Das Haus ist klein, und alt.")
_NUM_TEXT_TOKENS = 280
_LANGUAGES = ("en", "de", "fr")


@dataclass(frozen=True)
class SpeechTokens:
    """The special tokens of the tiny model, in Whisper's order; they follow the tokens of texts."""

    end: int = _NUM_TEXT_TOKENS

    @property
    def names(self) -> list[str]:
        """All special tokens except the times."""
        named = (*_LANGUAGES, "translate", "transcribe", "startoflm", "startofprev", "nospeech")
        return [f"<|{n}|>" for n in ("endoftext", "startoftranscript", *named, "notimestamps")]

    @property
    def times(self) -> list[str]:
        """The names of the times of a window."""
        return [f"<|{number * 0.02:.2f}|>" for number in range(NUM_POSITIONS + 1)]

    def of(self, name: str) -> int:
        """Return the id of a special token by its name without <| and |>."""
        return self.end + self.names.index(f"<|{name}|>")

    @property
    def number(self) -> int:
        """Size of the vocabulary."""
        return self.end + len(self.names) + len(self.times)


TOKENS = SpeechTokens()


def whisper_config(**changes: Any) -> WhisperConfig:
    """Return the config of the tiny model, with changes."""
    sizes = {
        "vocab_size": TOKENS.number,
        "num_mel_bins": NUM_MELS,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": NUM_POSITIONS,
        "max_target_positions": CONTEXT,
        "pad_token_id": TOKENS.end,
        "bos_token_id": TOKENS.end,
        "eos_token_id": TOKENS.end,
        "decoder_start_token_id": TOKENS.of("startoftranscript"),
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    return WhisperConfig(**{**sizes, **changes})


def generation_config(*, multilingual: bool = True) -> dict[str, Any]:
    """Return the content of generation_config.json of the tiny model."""
    content: dict[str, Any] = {
        "bos_token_id": TOKENS.end,
        "eos_token_id": TOKENS.end,
        "pad_token_id": TOKENS.end,
        "decoder_start_token_id": TOKENS.of("startoftranscript"),
        "max_length": CONTEXT,
        "is_multilingual": multilingual,
        "no_timestamps_token_id": TOKENS.of("notimestamps"),
        "prev_sot_token_id": TOKENS.of("startofprev"),
        "suppress_tokens": [
            *(3, 7, 11),
            *map(TOKENS.of, ("startoftranscript", "translate", "transcribe", "startoflm")),
            *map(TOKENS.of, ("startofprev", "nospeech")),
        ],
        "begin_suppress_tokens": [5, TOKENS.end],
        "max_initial_timestamp_index": 10,
        "alignment_heads": [[1, 0], [2, 3]],
        "return_timestamps": False,
    }
    if multilingual:
        content["lang_to_id"] = {f"<|{code}|>": TOKENS.of(code) for code in _LANGUAGES}
        content["task_to_id"] = {name: TOKENS.of(name) for name in ("transcribe", "translate")}
    return content


def speech_tokenizer() -> Tokenizer:
    """Return a byte-level BPE with Whisper's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_TEXT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    assert tokenizer.get_vocab_size() == _NUM_TEXT_TOKENS
    tokenizer.add_special_tokens(TOKENS.names)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in TOKENS.times])
    return tokenizer


def write_whisper(
    folder: Path, *, multilingual: bool = True, deviation: float = 0.17, **changes: Any
) -> Path:
    """Write the checkpoint; return its folder.

    Args:
        folder: folder to create.
        multilingual: whether it has languages and tasks.
        deviation: standard deviation of its matrices.
        changes: changes of its config.
    """
    write_checkpoint(folder, whisper_config(**changes), deviation)
    speech_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "WhisperTokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), TOKENS.names[0]),
        "additional_special_tokens": TOKENS.names,
        "language": "english" if multilingual else None,
        "task": "transcribe" if multilingual else None,
    }
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": NUM_MELS,
        "sampling_rate": SAMPLING_RATE,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": CHUNK_SECONDS,
    }
    contents = {
        "tokenizer_config.json": settings,
        "generation_config.json": generation_config(multilingual=multilingual),
        "preprocessor_config.json": features,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
