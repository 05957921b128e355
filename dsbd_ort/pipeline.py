"""Text in, text out: an opened bundle, its tokenizer and the decoding loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack, cast, overload

from dsbd_errors import DsbdError
from dsbd_ort.decoding import (
    DecodingConfig,
    DecodingOptions,
    TraceRecorder,
    WithResult,
    result_of,
)
from dsbd_ort.decoding.drafting.cost_curve import Costs
from dsbd_ort.model_pair import ModelPair, loaded_pair
from dsbd_ort.pipeline_options import OpeningOptions, PipelineOptions
from dsbd_ort.requests.bundle_requests import BundleRequests
from dsbd_ort.requests.option_defaults import Options, given_options
from dsbd_ort.requests.prompts import SRC_LANG, TGT_LANG, Prompt, Prompts, is_several
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_ort.wings import wing
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.chat_messages import Message

if TYPE_CHECKING:
    from dsbd_ort.audio.audio_files import Audio
    from dsbd_ort.speech.speech_request import SpeechOptions
    from dsbd_ort.speech.transcript import Segment, Transcript

BundlePath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(PipelineOptions):
    """The folder of a bundle and how it is opened; can be sent to another process."""

    bundle: Path

    def open(self) -> Pipeline:
        return Pipeline.from_options(self.bundle, self)


class Pipeline(BundleRequests):
    """An opened bundle, ready to generate; may be shared by threads.

    A request holds it from start to end (a stream until it is read to the end or closed) while
    those of other threads wait. Each request returns what it would return alone.

    models: the engines. They decode the requests that the methods of BundleRequests make.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: CausalLM,
        draft: CausalLM | None,
        *,
        options: PipelineOptions,
        costs: Costs | None = None,
    ) -> None:
        """Take the opened parts (``from_bundle`` opens them). ``costs`` None: learn them."""
        super().__init__(bundle, options, has_draft=draft is not None)
        if options.loop == "auto" and (self.transcribes or self.media is not None):
            # The core cannot run most of these requests, so the two loops would alternate.
            options = dataclasses.replace(options, loop="python")
        self.models = ModelPair(bundle, target, draft, options, costs)

    @classmethod
    def from_bundle(cls, path: BundlePath, **options: Unpack[OpeningOptions]) -> Self:
        """Open the bundle in the folder ``path``; keywords are the fields of PipelineOptions.

        Raises:
            ConfigError, InputError: a keyword is unknown, or its value is invalid.
            BundleError: the bundle is absent, damaged or contradictory.
            ProviderError: the provider is unknown or not on this machine.
        """
        return cls.from_options(path, PipelineOptions.of(options))

    @classmethod
    def from_options(cls, path: BundlePath, options: PipelineOptions) -> Self:
        """See ``from_bundle``."""
        bundle = open_bundle(path, verify=options.verify)
        target, draft = loaded_pair(bundle, options)
        return cls(bundle, target, draft, options=options)

    def close(self) -> None:
        """Wait for the requests of other threads, then release both engines and their caches."""
        self.models.close()
        self.constraints.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def translate(
        self,
        text: str,
        *,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **options: Unpack[DecodingOptions],
    ) -> GenerationResult:
        """Translate a text by an encoder-decoder; further keyword arguments as for ``generate``.

        src_lang, tgt_lang: names of languages in the model's spelling, such as "eng_Latn". None:
        the languages of its tokenizer and its generation_config.json.

        Raises the errors of ``generate``, and InputError for a model without such languages.
        """
        if self.prompts.encoder is None:
            raise InputError(
                f"the model of {self.bundle.path} is not an encoder-decoder, which translate "
                "needs; use generate with a prompt that asks for a translation"
            )
        given = {**options, SRC_LANG: src_lang, TGT_LANG: tgt_lang}
        request = self.prepare(text, given)
        return self.with_text(result_of(self.models.iterations(request)), request)

    def transcribe(
        self,
        audio: Audio,
        *,
        on_segment: Callable[[Segment], None] | None = None,
        **options: Unpack[SpeechOptions],
    ) -> Transcript:
        """Return the transcript of an audio; the bundle must hold a speech model.

        Args:
            audio: samples, (n,) floats at the model's rate, 16 kHz, or a path, the bytes of a file,
                or a file opened for bytes.
            on_segment: called with every segment as soon as it is decoded.
            options: see ``SpeechOptions``; further keywords are fields of DecodingConfig.

        Raises:
            InputError: the bundle has no speech model, or the audio or an option is invalid.
            DecodingError, CapacityError, BusyError, EngineError: as ``generate``.
        """
        transcript: Transcript = wing("speech").transcribe(self, audio, on_segment, options)
        return transcript

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Message] | None = None,
        *,
        source: Prompt | None = None,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        *,
        config: DecodingConfig | None = None,
        **options: Unpack[DecodingOptions],
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | Prompts | Sequence[Message] | None = None,
        *,
        source: Prompt | None = None,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Continue a prompt. For an encoder-decoder the prompt is the source, which it answers.

        Further keyword arguments are the fields of ``DecodingOptions``.

        A list of prompts gives a list of results. Each result is the one that its prompt would get
        alone. The prompts share the engine calls, and the cache rows of a common beginning.

        Args:
            prompt: text or token ids, a conversation (see ``chat_prompt``), or a list of texts or
                of lists of token ids.
            source: another name of the prompt, for encoder-decoders only.
            config: instead of keyword arguments. Used unchanged, except that ``eos_token_id`` None
                and ``seed`` None are filled in as for keywords.
            trace: records every iteration; usually a ``RequestTrace``.
            options: see DecodingOptions. Options that are left out, and ``eos_token_id`` None, get
                the model's defaults (``ModelDefaults``); lengths are cut to the context. ``seed``
                None draws a random seed, which the result reports.

        Raises:
            DecodingError: the options or the prompt are invalid.
            CapacityError: prompt and new tokens do not fit the model's context, or the memory.
            BusyError: this thread has a stream that is not finished.
            EngineError: an engine failed in a call.
        """
        given = given_options(config, options)
        prompt = self.prompts.the_one(prompt, source)
        if is_several(prompt):
            if trace is not None:
                raise InputError("trace records one request; generate its prompt alone")
            return self._generate_all(cast("Sequence[Prompt]", prompt), given)
        request = self.prepare(cast("Prompt | Sequence[Message]", prompt), given, trace=trace)
        return self.with_text(result_of(self.models.iterations(request)), request)

    def _generate_all(self, prompts: Sequence[Prompt], options: Options) -> list[GenerationResult]:
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(self.prepare(prompt, options))
                self.models.check(requests[-1])
            except DsbdError as error:
                error.add_note(f"prompt {index} of the list")
                raise
        results = self.models.decoded(requests)
        return [self.with_text(*each) for each in zip(results, requests, strict=True)]

    def stream(
        self,
        prompt: Prompt,
        *,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Generator[StreamPiece, None, GenerationResult]:
        """Stream the continuation of a prompt: yield final tokens and text, return the result.

        Every iteration yields one piece, so that a caller may stop between iterations. A piece is
        empty while the live beams disagree; the last piece holds the rest of the best sequence. The
        texts together are the text of that sequence. See ``generate`` for arguments and errors.
        """
        request = self.prepare(prompt, given_options(config, options), trace=trace)
        texts = self.text_stream(request)
        with contextlib.closing(self.models.iterations(request)) as iterations:
            outputs = WithResult(iterations)
            for output in outputs:
                yield texts.push(output)
        result = self.with_text(outputs.result, request)
        yield texts.finish(result.sequences[0])
        return result
