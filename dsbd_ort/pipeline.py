"""Text in, text out: an opened bundle, its tokenizer and the decoding loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, Unpack, cast, overload

import numpy as np

from dsbd_errors import DsbdError
from dsbd_forward.forward import Source
from dsbd_ort.bundle_requests import BundleRequests
from dsbd_ort.decoding import (
    DecodeResult,
    DecodingConfig,
    DecodingOptions,
    DecodingRequest,
    TraceRecorder,
    WithResult,
    result_of,
)
from dsbd_ort.decoding.decoder import Decoder
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import Costs
from dsbd_ort.decoding.native_decoder import new_decoder
from dsbd_ort.decoding.set_up import check_decodable
from dsbd_ort.decoding.whole_requests import Iterations, decoded_alone, decoded_together
from dsbd_ort.model_pair import (
    MOST_ESTIMATORS,
    Recent,
    RequestLock,
    capacity_error,
    drafting_setting,
    learned_costs,
    loaded_pair,
    new_estimator,
)
from dsbd_ort.option_defaults import Options, given_options
from dsbd_ort.pipeline_options import OpeningOptions, PipelineOptions
from dsbd_ort.prompts import SRC_LANG, TGT_LANG, Prompt, Prompts, is_several
from dsbd_ort.results import GenerationResult, StreamPiece
from dsbd_ort.speech.audio import SAMPLING_RATE
from dsbd_ort.speech.prompted_transcription import PromptedTranscription
from dsbd_ort.speech.speech_request import Audio, SpeechOptions, SpeechRequest, read_samples
from dsbd_ort.speech.spoken_parts import speech_transcription
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_ort.speech.transcription import Transcription, WhisperTranscription, answered
from dsbd_ort.speech.voice_activity import VAD, read_vad
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.alignment import AlignedTokens, Alignment
from dsbd_runtime.parts.sources import Sources
from dsbd_runtime.text.chat_messages import Message

BundlePath = str | os.PathLike[str]
_TOGETHER = 8  # prompts of a list that share the engine calls


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(PipelineOptions):
    """The folder of a bundle and how it is opened; can be sent to another process."""

    bundle: Path

    def open(self) -> Pipeline:
        return Pipeline.from_options(self.bundle, self)


class Pipeline:
    """An opened bundle, ready to generate; may be shared by threads.

    A request holds it from start to end (a stream until it is read to the end or closed) while
    those of other threads wait. Each request returns what it would return alone.

    Attributes:
        requests: makes requests of prompts and options, and texts of their results.
        bundle, tokenizer, has_draft, defaults, constraints, prompts: those of ``requests``.
        prepare, request_of, config: methods of ``requests``.
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
        """Take the opened parts; ``from_bundle`` opens them; ``costs`` None are learned."""
        self.requests = requests = BundleRequests(bundle, options, has_draft=draft is not None)
        self.bundle, self.tokenizer, self.has_draft = bundle, requests.tokenizer, requests.has_draft
        self.defaults, self.prompts = requests.defaults, requests.prompts
        self.constraints = requests.constraints
        self.prepare, self.request_of = requests.prepare, requests.request_of
        self.config = requests.config
        self._target = target
        self._draft = draft
        self._costs = costs or learned_costs(bundle, draft)
        self._lock = RequestLock()
        self._loop, self._reuses_prefix = options.loop, options.prefix_cache
        self._decoder = self.new_decoder()
        self._estimators: Recent[AcceptanceEstimator] = Recent(MOST_ESTIMATORS)

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

    @property
    def costs(self) -> Costs:
        """The costs of engine calls, which requests learn; setting others empties the caches."""
        return self._costs

    @costs.setter
    def costs(self, costs: Costs) -> None:
        self._free_memory(None)
        self._costs = costs
        self._decoder = self.new_decoder()

    @property
    def _models(self) -> list[CausalLM]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def close(self) -> None:
        """Wait for the requests of other threads, then release both engines and their caches."""
        with contextlib.nullcontext() if self._lock.is_own else self._lock.held():
            for model in self._models:
                model.close()
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

        src_lang, tgt_lang: names of languages as the model has them, such as "eng_Latn"; None for
        those that its tokenizer and its generation_config.json say.

        Raises the errors of ``generate``, and InputError for a model without such languages.
        """
        if self.prompts.encoder is None:
            raise InputError(
                f"the model of {self.bundle.path} is not an encoder-decoder, which translate "
                "needs; use generate with a prompt that asks for a translation"
            )
        given = {**options, SRC_LANG: src_lang, TGT_LANG: tgt_lang}
        request = self.prepare(text, given)
        return self.requests.with_text(result_of(self._iterations(request)), request)

    def transcribe(
        self,
        audio: Audio,
        *,
        on_segment: Callable[[Segment], None] | None = None,
        **options: Unpack[SpeechOptions],
    ) -> Transcript:
        """Return the text of an audio by a speech model.

        Args:
            audio: samples, (n,) floats at the model's rate, 16 kHz, or a path, the bytes of a file,
                or a file opened for bytes.
            on_segment: is called with every segment as soon as it is known.
            options: see ``SpeechOptions``; further ones are fields of DecodingConfig.

        Raises:
            InputError: the bundle is of no speech model, or the audio or an option is invalid.
            DecodingError, CapacityError, BusyError, EngineError: as ``generate``.
        """
        steps = self.transcription(audio, options).steps(on_segment, self._align)
        return answered(steps, self._decoded)

    def _decoded(self, requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
        if len(requests) == 1:
            return [result_of(self._iterations(requests[0]))]
        return self._decoded_together(requests)

    def _align(
        self, source: Source, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> AlignedTokens:
        with self._lock.held(), self._failures_cleaned_up():
            return self._target.part(Alignment).align(source, prompt_ids, token_ids)

    def transcription(self, audio: Audio, options: Mapping[str, Any]) -> Transcription:
        """Return the transcription of an audio, whose requests are still to be decoded."""
        if (vad := read_vad(options.get(VAD))) is not None:
            samples, given = read_samples(audio, SAMPLING_RATE), {**options, VAD: False}
            return speech_transcription(samples, vad, lambda part: self.transcription(part, given))
        media = self.requests.media
        if media is not None and media.sound is not None:
            samples = read_samples(audio, media.sound.entry.sampling_rate)
            vocab_size = self.bundle.manifest.target.vocab_size
            return PromptedTranscription(self, media, media.sound, samples, options, vocab_size)
        encoder = self.prompts.encoder
        if encoder is None or encoder.speech is None:
            raise InputError(
                f"the model of {self.bundle.path} reads text, not sound, which transcribe needs; "
                "use a bundle of a speech model such as Whisper or Qwen3-ASR"
            )
        samples, vocab_size = read_samples(audio, encoder.speech.sampling_rate), encoder.vocab_size
        request = SpeechRequest.read(
            options, encoder.speech, self.tokenizer, vocab_size, self.bundle.context_length
        )
        return WhisperTranscription(self, encoder.speech, encoder.start_token_id, samples, request)

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
        """Continue a prompt, or answer a source by an encoder-decoder, whose prompt it is.

        Further keyword arguments are the fields of ``DecodingOptions``.

        A list of prompts gives a list of results, each that of its prompt alone; they share the
        engine calls, and the cache as far as they begin alike.

        Args:
            prompt: text or token ids, a conversation (see ``chat_prompt``), or a list of texts or
                of lists of token ids.
            source: another name of the prompt, for encoder-decoders only.
            config: instead of keyword arguments, used unchanged, except that ``eos_token_id`` and
                ``seed`` None are filled in as for keywords.
            trace: records every iteration; usually a ``RequestTrace``.
            options: see DecodingOptions. For options that are left out, and ``eos_token_id`` None,
                the model's defaults are used (``ModelDefaults``), as far as they fit the context.
                ``seed`` None is a random one, which the result reports.

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
        return self.requests.with_text(result_of(self._iterations(request)), request)

    def _generate_all(self, prompts: Sequence[Prompt], options: Options) -> list[GenerationResult]:
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(self.prepare(prompt, options))
                check_decodable(
                    requests[-1], self._target.spec, self._draft.spec if self._draft else None
                )
            except DsbdError as error:
                error.add_note(f"prompt {index} of the list")
                raise
        return [
            self.requests.with_text(result, request)
            for result, request in zip(self._decoded_together(requests), requests, strict=True)
        ]

    def _decoded_together(self, requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
        with self.engines(), self._failures_cleaned_up():
            planned = [self.planned(request) for request in requests]
            found = decoded_together(self._decoder, planned, _TOGETHER)
            return [self.with_peak(each) for each in found]

    def stream(
        self,
        prompt: Prompt,
        *,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Generator[StreamPiece, None, GenerationResult]:
        """Stream the continuation of a prompt: yield final tokens and text, return the result.

        Every iteration yields one piece, empty while the live beams disagree, so that a caller may
        stop between iterations; the last piece holds the rest of the best sequence. The texts
        together are the text of that sequence. See ``generate`` for arguments and errors.
        """
        request = self.prepare(prompt, given_options(config, options), trace=trace)
        texts = self.requests.text_stream(request)
        with contextlib.closing(self._iterations(request)) as iterations:
            outputs = WithResult(iterations)
            for output in outputs:
                yield texts.push(output)
        result = self.requests.with_text(outputs.result, request)
        yield texts.finish(result.sequences[0])
        return result

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the checkpoint's chat template.

        They are a prompt for ``generate`` and ``stream``, with the sounds or pictures of the
        messages if the model reads them. ``chat_template_kwargs`` are more variables of the
        template, such as ``enable_thinking``. See ChatTemplate.render.

        Raises:
            BundleError: the bundle has no chat template.
            InputError: the template refuses the messages, or would leave one out; or the model is
                an encoder-decoder.
        """
        return self.requests.chat_prompt(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )

    @property
    def transcribes(self) -> bool:
        """Whether the model reads sound."""
        encoder, media = self.prompts.encoder, self.requests.media
        is_speech = encoder is not None and encoder.speech is not None
        return is_speech or (media is not None and media.sound is not None)

    @contextlib.contextmanager
    def held_source(self, source: Source) -> Iterator[None]:
        """Keep a source in the engines while requests for it, of any thread, follow one another."""
        with contextlib.ExitStack() as held:
            for model in self._models:
                for sources in model.parts_of(Sources):
                    held.enter_context(sources.slots.held(source))
            yield

    def new_decoder(self, max_rows: int | None = None) -> Decoder:
        """Return a decoder on the engines, whose caches are empty and used for nothing else."""
        loop = self._loop
        if loop == "auto" and (self.transcribes or self.requests.media is not None):
            loop = "python"  # the core knows too few of the requests, and the loops take turns
        return new_decoder(
            self._target,
            self._draft,
            loop,
            max_rows=max_rows,
            shares_prefixes=self._reuses_prefix,
            costs=self.costs,
        )

    def planned(self, request: DecodingRequest) -> DecodingRequest:
        """Return the request with the costs and the acceptance estimator of its draft policy."""
        config, draft = request.config, self.bundle.manifest.draft
        if config.draft_policy != "throughput":
            return request
        setting = drafting_setting(config)
        estimator = self._estimators.of(setting, lambda: new_estimator(config, draft))
        return dataclasses.replace(request, costs=self.costs, estimator=estimator)

    @contextlib.contextmanager
    def engines(self) -> Iterator[tuple[CausalLM, CausalLM | None]]:
        """Hold target and draft (None without one) with empty caches; other threads wait."""
        with self._lock.held():
            try:
                self._free_memory(None)
                yield self._target, self._draft
            finally:
                self._free_memory(None)

    def _iterations(self, request: DecodingRequest) -> Iterations:
        with self._lock.held(), self._failures_cleaned_up():
            self._free_memory(request)
            iterations = decoded_alone(self._decoder, self.planned(request))
            return self.with_peak((yield from iterations))

    def with_peak(self, result: DecodeResult) -> DecodeResult:
        """Return a decoding result with the peak memory of all caches."""
        kv_bytes_peak = sum(model.kv_bytes_peak for model in self._models)
        kv_bytes_peak += result.distribution_bytes_peak
        stats = dataclasses.replace(result.stats, kv_bytes_peak=kv_bytes_peak)
        return dataclasses.replace(result, stats=stats)

    @contextlib.contextmanager
    def _failures_cleaned_up(self) -> Iterator[None]:
        """Reuse no row of a request that fails; turn a MemoryError into a CapacityError."""
        try:
            yield
        except GeneratorExit:  # a stream was closed: its rows are valid
            raise
        except BaseException as error:
            self._decoder.forget()
            if isinstance(error, MemoryError):
                raise capacity_error(error) from error
            raise

    def _free_memory(self, request: DecodingRequest | None) -> None:
        """Free the memory of all rows except those that a request can use."""
        self._decoder.keep_for(request)
        for model in self._models:
            if request is None:
                model.keep(np.arange(0))  # also frees what it keeps of sources
            model.shrink()
            model.reset_peak()
