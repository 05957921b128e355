"""Requests to a bundle: prompts and options as the engines read them, and results as text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dsbd_ort.constraints.binding import ConstraintBinding, items_of
from dsbd_ort.decoding import DecodeResult, DecodingConfig, DecodingRequest, TraceRecorder
from dsbd_ort.decoding.drafting.ngram import NGramPool
from dsbd_ort.decoding.logits_processing.allowed_after import AllowedMass
from dsbd_ort.decoding.option_table import OPTION_TABLE
from dsbd_ort.pipeline_options import PipelineOptions
from dsbd_ort.requests.option_defaults import ModelDefaults, Options, resolve
from dsbd_ort.requests.prompts import (
    SRC_LANG,
    Prompt,
    PromptReader,
    RequestInputs,
    check_context,
    is_conversation,
    new_seed,
)
from dsbd_ort.requests.recent import Recent
from dsbd_ort.requests.results import (
    GeneratedSequence,
    GenerationResult,
    TextStream,
    stop_state,
    text_until_stop,
)
from dsbd_ort.wings import wing
from dsbd_runtime.bundle_files.bundle import TOKENIZER_FILE, Bundle
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.chat_messages import Message
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.stream_decoder import TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dsbd_ort.media.media_prompts import MediaReader, PictureReader
    from dsbd_ort.media.message_parts import MediaLimits


MOST_CALLERS = 64
"""Number of callers whose texts are kept for the n-gram drafter; the least recent is dropped."""


def check_drafter(config: DecodingConfig, *, has_draft: bool) -> None:
    """Raise InputError for a request that needs a draft model if the bundle has no draft."""
    if has_draft or not config.has_draft_model:
        return
    fix = "or add a draft with: dsbd-export --bundle BUNDLE --draft DRAFT"
    if OPTION_TABLE["drafter"].unmet(config) is None:
        raise InputError(
            f"drafter is {config.drafter!r}, but the bundle has no draft: expected 'ngram' or "
            f"'none'; {fix}"
        )
    raise InputError(
        f"strategy is {config.strategy!r}, which needs a draft model, but the bundle has no draft; "
        f"use another strategy, {fix}"
    )


class BundleRequests:
    """Makes the requests to a bundle, and the texts of their results, without engine calls."""

    def __init__(self, bundle: Bundle, options: PipelineOptions, *, has_draft: bool) -> None:
        self.bundle = bundle
        self.has_draft = has_draft
        self.tokenizer = Tokenizer.from_bundle(bundle)
        self.prompts = PromptReader(bundle, self.tokenizer)
        # reads messages with sounds or pictures, if the model does
        self.media: MediaReader | PictureReader | None = None
        target = bundle.manifest.target
        if target.given or (target.encoder and target.encoder.picture):
            read = wing("media").media_reader
            self.media = read(bundle, self.tokenizer, lambda: self.chat_template)
        self.defaults = ModelDefaults.from_bundle(
            bundle, reads_file=options.generation_config, of_chats=options.chat_defaults
        )
        self.defaults.log()
        self._most_of_pool = options.ngram_pool
        self._pools: Recent[NGramPool] = Recent(MOST_CALLERS)
        self.constraints = ConstraintBinding(
            bundle.path / TOKENIZER_FILE, target.vocab_size, target.eos_token_ids
        )

    def prepare(
        self,
        prompt: Prompt | Sequence[Message],
        options: Options,
        *,
        trace: TraceRecorder | None = None,
        caller: str = "",
    ) -> DecodingRequest:
        """Return the validated request of ``generate``.

        caller: the n-gram drafter searches the earlier texts of this caller only.
        """
        src_lang = options.get(SRC_LANG) if isinstance(options, Mapping) else None
        read = self.chat_prompt(prompt) if is_conversation(prompt) else cast("Prompt", prompt)
        inputs = self.prompts.read(read, src_lang)
        return self.request_of(inputs, options, trace=trace, caller=caller)

    def request_of(
        self,
        inputs: RequestInputs,
        options: Options,
        *,
        trace: TraceRecorder | None = None,
        caller: str = "",
        allowed_mass: AllowedMass | None = None,
    ) -> DecodingRequest:
        """Return a validated request for inputs of the engines; see ``prepare``."""
        config = self._with_bound_scorers(self.config(options))
        if config.prompt_logprobs and inputs.source is not None:
            raise InputError(
                "prompt_logprobs is true, but the prompt has media, whose rows are no tokens; "
                "leave it out"
            )
        token_ids = inputs.prompt_ids
        room = self.bundle.context_length - len(token_ids)
        gives_length = isinstance(options, DecodingConfig) or "max_new_tokens" in options
        if not gives_length and 0 < room < config.max_new_tokens:
            config = dataclasses.replace(config, max_new_tokens=room)
        if not isinstance(options, DecodingConfig):
            config = self.defaults.lengthened(config, options, len(token_ids))
        check_context(self.bundle, len(token_ids), config.max_new_tokens)
        start = self.text_start(token_ids, config)
        return DecodingRequest(
            prompt_ids=token_ids,
            config=config,
            rng=np.random.default_rng(config.seed),
            stop=stop_state(start, config.stop_strings),
            constraint=self.constraints.bound(
                config.constraint, config.eos_ids, start.num_dropped_spaces
            ),
            ngram_pool=self._pool_of(caller) if config.has_ngram_drafter else None,
            trace=trace,
            source=inputs.source,
            begin_token=self._begin_token(token_ids),
            copied_ids=inputs.copied_ids,
            allowed_mass=allowed_mass,
        )

    def _pool_of(self, caller: str) -> NGramPool | None:
        """Return the texts of a caller's earlier requests; None if they are not kept."""
        size = self._most_of_pool
        return self._pools.of(caller, lambda: NGramPool(size)) if size else None

    def _begin_token(self, token_ids: Sequence[int]) -> int | None:
        """Return the token that begins every text, if this prompt begins with it."""
        begin = self.bundle.manifest.target.bos_token_id
        return begin if begin is not None and [*token_ids[:1]] == [begin] else None

    def resolve(self, options: Mapping[str, Any]) -> DecodingConfig:
        """Return the config of a request, with end tokens and seed, or raise ConfigError."""
        options = self.prompts.with_language(self.constraints.options(options))
        return resolve({**options, **self._ends_and_seed(options)}, self.defaults)

    def _ends_and_seed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        filled: dict[str, Any] = {}
        if options.get("eos_token_id") is None:
            filled["eos_token_id"] = tuple(self.bundle.manifest.target.eos_token_ids)
        if options.get("seed") is None:
            filled["seed"] = new_seed()
        return filled

    def config(self, options: Options) -> DecodingConfig:
        """Return the config of a request on this bundle, with end tokens, seed and drafter.

        ConfigError, ConstraintError: the options are invalid, or contradict each other.
        InputError: the options need a draft model, and the bundle has no draft.
        """
        if isinstance(options, DecodingConfig):
            config = options
            if filled := self._ends_and_seed(vars(options)):
                config = dataclasses.replace(options, **filled)
        else:
            config = self.resolve(options)
        if config.prompt_logprobs and self.prompts.encoder is not None:
            raise InputError(
                "prompt_logprobs is true, but the prompt of an encoder-decoder is its source, of "
                "which it predicts no token; leave it out"
            )
        num_predicted, limit = len(config.predicted_token_ids), self.bundle.context_length
        if config.predicted_text is not None or num_predicted > limit:
            config = dataclasses.replace(config, **self._predicted(config))
        config = config.settled(costs_are_known=True, has_draft=self.has_draft)
        check_drafter(config, has_draft=self.has_draft)
        return config

    def _predicted(self, config: DecodingConfig) -> dict[str, Any]:
        """Return the prediction as options with token ids, cut to the context length."""
        text, token_ids = config.predicted_text or "", config.predicted_token_ids
        if text and token_ids:
            raise InputError(
                "predicted_text and predicted_token_ids are both given; leave out one of them"
            )
        if text:
            size = self.bundle.manifest.target.vocab_size
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            token_ids = tuple(token for token in encoded if token < size)  # no others are generated
        limit = self.bundle.context_length
        return {"predicted_text": None, "predicted_token_ids": token_ids[:limit]}

    def _with_bound_scorers(self, config: DecodingConfig) -> DecodingConfig:
        if not any(hasattr(each, "bind") for each in config.scorers):
            return config
        binding = self.tokenizer, self.bundle.manifest.target.vocab_size, sorted(config.eos_ids)
        bound = (each.bind(*binding) if hasattr(each, "bind") else each for each in config.scorers)
        return dataclasses.replace(config, scorers=tuple(bound))

    def text_start(self, prompt_ids: Sequence[int], config: DecodingConfig) -> TextWindow:
        skips = config.skip_special_tokens
        tokenizer = self.tokenizer if skips else self.tokenizer.with_special_tokens
        return TextWindow.after(tokenizer, prompt_ids)

    def text_stream(self, request: DecodingRequest) -> TextStream:
        config = request.config
        start = self.text_start(request.prompt_ids, config)
        return TextStream(start, config.stop_strings, config.min_new_tokens)

    def with_text(self, result: DecodeResult, request: DecodingRequest) -> GenerationResult:
        sequences, config = [], request.config
        start = self.text_start(request.prompt_ids, config)
        for sequence in result.sequences:
            text = text_until_stop(start, sequence.token_ids, config)
            items = items_of(config.constraint, sequence)
            sequences.append(GeneratedSequence(**vars(sequence), text=text, items=items))
        assert config.seed is not None  # drawn by ``prepare``
        return GenerationResult(sequences, result.stats, config.seed, result.prompt_logprobs)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        limits: MediaLimits | None = None,
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
        if self.media is not None:
            return self.media.read(
                messages,
                add_generation_prompt=add_generation_prompt,
                variables=chat_template_kwargs,
                limits=limits,
            )
        if self.prompts.encoder is not None:
            raise InputError(
                f"the model of {self.bundle.path} is an encoder-decoder, which has no chats; give "
                "the text itself as the prompt: it is the source"
            )
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=chat_template_kwargs
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template; a BundleError without one."""
        return ChatTemplate.from_folder(self.bundle.path)

    @property
    def transcribes(self) -> bool:
        """Whether the model reads sound."""
        encoder = self.prompts.encoder
        is_speech = encoder is not None and encoder.speech is not None
        return is_speech or (self.media is not None and self.media.sound is not None)
