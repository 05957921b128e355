"""Kinds of language models that read sound."""

from __future__ import annotations

from collections.abc import Sequence
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
    Qwen3ASRForConditionalGeneration,
    SequenceFeatureExtractor,
    WhisperFeatureExtractor,
)

from dsbd_ort import Pipeline
from dsbd_ort.audio.log_mel import LogMel, MelForm
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_ort.speech.prompted.recipes import RECIPES, Asked
from scripts import qwen3_asr_checkpoint
from scripts.qwen3_asr_checkpoint import write_qwen3_asr
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
from tests.given import sounds as sounds_of_asr
from tests.given.checks import Example, Kind, Rows
from tests.speech import qwen3_asr
from tests.speech.sounds import Samples, noise

CLASSES: dict[str, Any] = {
    "glmasr": GlmAsrForConditionalGeneration,
    "granite_speech": GraniteSpeechForConditionalGeneration,
    "granite_speech_plus": GraniteSpeechPlusForConditionalGeneration,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
}
SECONDS = (0.05, 0.3, 0.4001, 0.79, 1.0, 1.99, 2.0, 3.301, 5.1, 7.0)  # blocks, windows: all parts
QUESTION = "the fox"
HEARD, SPELLED = noise(1.2, 7), "the quick brown fox says that he"


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


class SpeechKind(Kind):
    """Granite Speech (plus), GLM-ASR and Qwen2-Audio; a case has the seconds of its sound."""

    paths = (0.3,), (1.95,), (7.95,)
    read = (), (0.3,), (1.9,)
    eight = (0.3,), (0.4,), (1.0,), (1.9,), (1.9,), (3.0,), (), (1.0,)

    def load(self, folder: Path) -> Any:
        self.processor, self.most = processor_of(self.name, folder), 8.0
        if self.name == "qwen2_audio":  # reads one window
            self.most = 2.0
        self.is_granite = self.name.startswith("granite")
        if not self.is_granite:  # whose placeholders are read as another token
            self.options = {"suppress_tokens": (MODELS[self.name].placeholder,)}
            self.their_options = {"suppress_tokens": [MODELS[self.name].placeholder]}
        # transformers has no rows of other sounds, and of several windows its beams are wrong
        self.seconds = [s for s in SECONDS if s <= self.most and (s > 0.1 or self.is_granite)]
        self.encoded = [(each,) for each in self.seconds]
        self.most_searched = 7.0 if self.is_granite else 1.99
        self.more = [(each,) for each in self.seconds if 0.1 < each <= self.most_searched]
        self.paths = tuple(case for case in type(self).paths if case[0] <= self.most)
        return CLASSES[self.name].from_pretrained(folder, dtype=torch.float32)

    def example(self, case: tuple[float, ...], seed: int = 0) -> Example:
        if not case:
            inputs = inputs_of(self.pipe, None)
            return Example(inputs, {"input_ids": torch.tensor([inputs.prompt_ids])})
        samples = noise(min(case[0], self.most), seed)
        return self.of_samples(samples)

    def asked(self, text: str) -> list[dict[str, Any]]:
        return asked(noise(0.3), text)

    def of_samples(self, samples: Samples, text: str = QUESTION) -> Example:
        return Example(inputs_of(self.pipe, samples, text), self.inputs(samples, text))

    def prompts(self) -> list[Example]:
        texts = ("the fox", "Das Haus\n<|spare_1|>")
        return [self.of_samples(noise(each), text) for each in self.seconds for text in texts]

    def inputs(self, samples: Samples, text: str) -> dict[str, torch.Tensor]:
        """Return what the processor makes of a sound and a text of the user."""
        if self.is_granite:
            model = MODELS[self.name]
            chat = [{"role": "user", "content": f"{model.special_tokens[0]}{text}"}]
            rendered = self.processor.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, chat_template=model.template
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

    def requested(self, samples: Samples) -> dict[str, torch.Tensor]:
        """Return what the processor makes of a request to transcribe."""
        [message] = RECIPES[self.name].messages({}, Asked())
        return self.inputs(samples, message["content"][1]["text"])

    @torch.no_grad()
    def rows(self, example: Example) -> Rows:
        """Return the rows that the language model reads, (E, W)."""
        found: list[torch.Tensor] = []
        hook = self.model.model.language_model.register_forward_pre_hook(
            lambda _, __, given: found.append(given["inputs_embeds"]), with_kwargs=True
        )
        self.model(**example.theirs)
        hook.remove()
        is_row = example.theirs["input_ids"][0] == MODELS[self.name].placeholder
        return np.asarray(found[0][0][is_row].numpy())

    @staticmethod
    def export(captures: SharedCaptures, name: str, folder: Path) -> Path:
        """Write the checkpoint; that of Granite Speech spells ``SPELLED`` of ``HEARD``."""
        target = write_speech_model(name, folder / "target")
        if name == "granite_speech":
            model = CLASSES[name].from_pretrained(target, dtype=torch.float32)
            spell(model, _GraniteFeatures()([HEARD])["input_features"], SPELLED)
            model.save_pretrained(target)
        return export_quietly(captures, folder / "bundle", target)


class QwenAsr(Kind):
    """Qwen3-ASR; a case has the frames of its sounds, or their names.

    tests/speech/test_media_prompts.py compares its prompts.
    """

    lengths = (1,), (37,), (100,), (150,), (237,), (400,), (613,), (999,)  # parts of windows
    encoded = *lengths, ("silence",), ("tones",)
    paths = (37,), (237,), (999,), (100, 50), (613, 1)
    read = (37,), (237,), ()
    more = *lengths, ()
    eight = (37,), (100,), (150,), (237,), (237,), (400,), (50,), ()

    most_searched = float("inf")

    def load(self, folder: Path) -> Any:
        self.folder = folder
        return Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)

    def example(self, case: tuple[int | str, ...], seed: int = 0) -> Example:
        given = self.pipe.bundle.manifest.target.given
        assert given is not None
        num_mels = given.medium.num_mels  # type: ignore[attr-defined]
        tones = np.where(np.arange(16)[:, None] == np.arange(431) // 7 % 16, 1.2, -0.7)
        known = {"silence": np.full((16, 200), -1.5), "tones": tones}
        sounds = [
            known[each].astype(np.float32)
            if isinstance(each, str)
            else sounds_of_asr.noise(each, seed + number, num_mels)
            for number, each in enumerate(case)
        ]
        prompt = sounds_of_asr.prompt_of(len(sounds), seed)
        inputs = sounds_of_asr.inputs_of(self.pipe, prompt, sounds)
        read = padded(sounds) if sounds else {}
        return Example(inputs, {"input_ids": torch.tensor([inputs.prompt_ids]), **read})

    def requested(
        self, samples: Samples, language: str | None = None, initial_prompt: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what the processor makes of a request to transcribe."""
        processor = qwen3_asr.processor_of(self.folder, qwen3_asr_checkpoint.NUM_MELS)
        return dict(
            processor.apply_transcription_request(samples, language=language, prompt=initial_prompt)
        )

    @torch.no_grad()
    def rows(self, example: Example) -> Rows:
        features = {name: each for name, each in example.theirs.items() if name != "input_ids"}
        found = self.model.get_audio_features(**features, return_dict=True)
        return np.asarray(found.pooler_output.numpy())

    @staticmethod
    def export(captures: SharedCaptures, name: str, folder: Path) -> Path:
        """Write a target shaped as the 1.7B, and a draft as the 0.6B."""
        # 1.7B: heads as wide together as the rows. 0.6B: twice as wide, and a narrower encoder.
        target = write_qwen3_asr(folder / "target", hidden_size=64)
        draft = write_qwen3_asr(
            folder / "draft", hidden_size=32, num_hidden_layers=1, audio={"encoder_layers": 1}
        )
        return export_quietly(captures, folder / "bundle", target, draft)


def padded(sounds: Sequence[NDArray[np.float32]]) -> dict[str, torch.Tensor]:
    """Return what transformers' Qwen3-ASR reads of sounds: padded alike, with a mask."""
    width = -(-max(sound.shape[1] for sound in sounds) // 100) * 100
    wide = [np.pad(sound, ((0, 0), (0, width - sound.shape[1]))) for sound in sounds]
    mask = [np.arange(width) < sound.shape[1] for sound in sounds]
    return {
        "input_features": torch.from_numpy(np.stack(wide)),
        "input_features_mask": torch.from_numpy(np.stack(mask).astype(np.int64)),
    }


def asked(samples: Samples, text: str = QUESTION) -> list[dict[str, Any]]:
    parts = [{"type": "audio", "audio": samples}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def inputs_of(pipe: Pipeline, samples: Samples | None, text: str = QUESTION) -> RequestInputs:
    """Return the prompt of a conversation with a sound; None: of text alone."""
    media = pipe.media
    assert media is not None
    messages = [{"role": "user", "content": text}] if samples is None else asked(samples, text)
    return media.read(messages).inputs
