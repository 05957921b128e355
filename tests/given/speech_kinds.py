"""Tiny models that read sound, other than Qwen3-ASR: exports, and transformers' results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    BatchFeature,
    GlmAsrForConditionalGeneration,
    GlmAsrProcessor,
    GraniteSpeechFeatureExtractor,
    GraniteSpeechForConditionalGeneration,
    GraniteSpeechPlusForConditionalGeneration,
    GraniteSpeechProcessor,
    PreTrainedTokenizerFast,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    SequenceFeatureExtractor,
    WhisperFeatureExtractor,
)

from dsbd_ort import Pipeline
from dsbd_ort.audio.log_mel import LogMel, MelForm
from dsbd_ort.requests.prompts import RequestInputs
from scripts.shared_captures import SharedCaptures
from scripts.speech_checkpoints import (
    MODELS,
    NUM_MELS,
    WINDOW_FRAMES,
    WINDOW_PAIRS,
    spell,
    write_speech_model,
)
from tests.exports import export_quietly
from tests.given.forests import Searched, searched
from tests.speech.sounds import Samples, noise

CLASSES: dict[str, Any] = {
    "glmasr": GlmAsrForConditionalGeneration,
    "granite_speech": GraniteSpeechForConditionalGeneration,
    "granite_speech_plus": GraniteSpeechPlusForConditionalGeneration,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
}
ENDS = (42, 77, 120)
QUESTION = "the fox"
HEARD, SPELLED = noise(1.2, 7), "the quick brown fox says that he"


def export_speech_model(captures: SharedCaptures, name: str, folder: Path) -> Path:
    """Fill a folder with the checkpoint of a kind, and its bundle.

    That of Granite Speech spells ``SPELLED`` of the sound ``HEARD``.
    """
    target = write_speech_model(name, folder / "target")
    if name == "granite_speech":
        model = CLASSES[name].from_pretrained(target, dtype=torch.float32)
        spell(model, _GraniteFeatures()([HEARD])["input_features"], SPELLED)
        model.save_pretrained(target)
    export_quietly(captures, folder / "bundle", target)
    return folder


_GRANITE = MelForm(
    num_mels=NUM_MELS,
    n_fft=512,
    window_length=400,
    hop_length=160,
    sampling_rate=16_000,
    least_samples=0,
    is_htk=True,
    keeps_last=True,
)


class _GraniteFeatures(GraniteSpeechFeatureExtractor):
    """Granite's extractor without torchaudio: features of numpy, which other tests compare."""

    def __init__(self) -> None:
        SequenceFeatureExtractor.__init__(
            self, feature_size=NUM_MELS, sampling_rate=16_000, padding_value=0.0
        )
        self.melspec_kwargs = {"hop_length": 160}
        self.projector_window_size, self.projector_downsample_rate = WINDOW_PAIRS, 5

    def __call__(self, audios: Sequence[Samples], device: str | None = None) -> BatchFeature:
        [samples] = audios
        features = LogMel(_GRANITE)(samples)
        if features.shape[1] % 2:
            features = features[:, :-1]
        stacked = torch.from_numpy(features.T.copy()).reshape(1, -1, 2 * NUM_MELS)
        sizes = self._get_num_audio_features([len(samples)])
        return BatchFeature({"input_features": stacked, "audio_embed_sizes": sizes})


def processor_of(name: str, folder: Path) -> Any:
    """Return transformers' processor of a checkpoint."""
    tokens = MODELS[name].special_tokens
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token=tokens[1]
    )
    named = {"chat_template": MODELS[name].template, "audio_token": tokens[0]}
    if name.startswith("granite"):
        return GraniteSpeechProcessor(_GraniteFeatures(), tokenizer, **named)
    kind = GlmAsrProcessor if name == "glmasr" else Qwen2AudioProcessor
    extractor = WhisperFeatureExtractor(
        feature_size=NUM_MELS, chunk_length=WINDOW_FRAMES // 100, sampling_rate=16_000
    )
    return kind(extractor, tokenizer, **named)


@dataclass
class SpeechReference:
    """A checkpoint in transformers, with its own processor."""

    name: str
    model: Any
    processor: Any

    @classmethod
    def of(cls, name: str, folder: Path) -> SpeechReference:
        model = CLASSES[name].from_pretrained(folder, dtype=torch.float32)
        return cls(name, model, processor_of(name, folder))

    def inputs(self, samples: Samples, text: str) -> dict[str, torch.Tensor]:
        """Return what the processor makes of a sound and a text of the user."""
        if self.name.startswith("granite"):
            chat = [{"role": "user", "content": f"{MODELS[self.name].special_tokens[0]}{text}"}]
            rendered = self.processor.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, chat_template=self.template
            )
            return dict(self.processor(rendered, [samples], return_tensors="pt"))
        if self.name == "glmasr":
            return dict(self.processor.apply_transcription_request(samples, prompt=text))
        chat = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": text}]}]
        rendered = self.processor.apply_chat_template(chat, add_generation_prompt=True)
        return dict(
            self.processor(
                text=rendered, audio=[samples], sampling_rate=16_000, return_tensors="pt"
            )
        )

    @property
    def template(self) -> str:
        return MODELS[self.name].template

    @torch.no_grad()
    def rows(self, samples: Samples) -> NDArray[np.float32]:
        """Return the rows that the language model reads, (E, W)."""
        found: list[torch.Tensor] = []
        hook = self.model.model.language_model.register_forward_pre_hook(
            lambda _, __, given: found.append(given["inputs_embeds"]), with_kwargs=True
        )
        inputs = self.inputs(samples, QUESTION)
        self.model(**inputs)
        hook.remove()
        is_row = inputs["input_ids"][0] == MODELS[self.name].placeholder
        return np.asarray(found[0][0][is_row].numpy())

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], inputs: dict[str, Any]) -> NDArray[np.float32]:
        """Return the logits of a path that begins with a prompt's inputs."""
        ids = torch.tensor([list(token_ids)])
        more = {name: value for name, value in inputs.items() if "input_ids" not in name}
        more["attention_mask"] = torch.ones_like(ids)
        return np.asarray(self.model(input_ids=ids, **more).logits[0].numpy())

    def searched(self, inputs: dict[str, Any], beams: int, length: int) -> Searched:
        has_token = not self.name.startswith("granite")
        suppressed = [MODELS[self.name].placeholder] if has_token else None
        given = {**inputs, "suppress_tokens": suppressed}
        return searched(self.model, given, beams, length, ENDS)


def asked(samples: Samples, text: str = QUESTION) -> list[dict[str, Any]]:
    parts = [{"type": "audio", "audio": samples}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def inputs_of(pipe: Pipeline, samples: Samples | None, text: str = QUESTION) -> RequestInputs:
    """Return the prompt of a conversation with a sound; None: of text alone."""
    media = pipe.media
    assert media is not None
    messages = [{"role": "user", "content": text}] if samples is None else asked(samples, text)
    return media.read(messages).inputs


def options_of(name: str, **options: Any) -> dict[str, Any]:
    """Return options of a request that ends as ``searched`` does."""
    known: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": ENDS, "seed": 1}
    if not name.startswith("granite"):  # whose placeholders are read as another token
        known["suppress_tokens"] = (MODELS[name].placeholder,)
    return {**known, **options}
