"""Engine requests that answer one HTTP request: prompts, options, strategy, seeds."""

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.constraints import TokenTrie
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.engine import Service
from dsbd_ort.media.message_parts import MediaLimits
from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.choices import (
    Choices,
    check_config,
    check_limit,
    check_prompt,
    choices_of,
    for_choices,
    with_seeds,
)
from dsbd_ort.openai_server.completions import CompletionBody
from dsbd_ort.openai_server.errors import bad_request, rejection
from dsbd_ort.openai_server.media_urls import MediaFetcher
from dsbd_ort.openai_server.plain_tools import (
    CALL_BEGINS,
    PLAIN,
    as_text,
    offer,
    with_system_text,
    with_user_text,
)
from dsbd_ort.openai_server.protocol import GenerationBody
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.openai_server.structured import contradiction, read_constraint
from dsbd_ort.openai_server.tools import ToolUse, auto_fault, tool_use
from dsbd_ort.requests.option_defaults import ServerDefaults, with_server
from dsbd_ort.requests.prompts import SRC_LANG
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.stream_decoder import whole_text

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """All engine requests of one HTTP request: those of the first prompt, then those of the next.

    configs: one for each engine request, the same number for each prompt; see ``Pipeline.config``.
    num_choices: different sequences to return for each prompt.
    num_copies: how often each sequence is returned; all sequences of a greedy request are equal.
    is_ranked: whether only the best sequences are returned, best first; else all, ordered by seed.
    echoes: the texts of the prompts, if the response begins with them; else None.
    tools: how answers become tool calls; None if answers are plain text.
    drops_new_tokens: whether only the prompts are returned (``max_tokens`` 0).
    """

    prompts: list[list[int]]
    configs: list[DecodingConfig]
    num_choices: int
    num_copies: int
    is_ranked: bool
    echoes: tuple[str, ...] | None = None
    tools: ToolUse | None = None
    drops_new_tokens: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def strategy(self) -> str:
        return str(self.configs[0].strategy)

    @property
    def num_samples(self) -> int:
        return len(self.configs) // len(self.prompts)

    def seed(self, request_index: int = 0) -> int:
        seed = self.configs[request_index].seed
        assert seed is not None  # decided by ``Pipeline.config``
        return seed

    def prompt_index(self, request_index: int) -> int:
        return request_index // self.num_samples

    @property
    def names_tokens(self) -> bool:
        """Whether the answer is the token ids themselves, as under a trie."""
        return isinstance(self.configs[0].constraint, TokenTrie)


class Planner:
    """Plans requests within a server's limits. Call it outside the event loop: it tokenizes."""

    def __init__(
        self, service: Service, settings: ServingSettings, new_seed: Callable[[], int]
    ) -> None:
        """``new_seed`` returns a seed for a request without one. DsbdError: invalid defaults."""
        self._service = service
        self._pipeline = service.pipeline
        self._settings = settings
        self._defaults = ServerDefaults(settings.defaults)
        # Refuses options that no request could have.
        self._pipeline.config(with_server({}, self._defaults, self._pipeline.defaults))
        self._new_seed = new_seed
        fetch = MediaFetcher(settings.max_audio_bytes) if settings.fetches_urls else None
        self._media = MediaLimits(max_seconds=settings.max_audio_s, read_url=fetch)
        self._pipeline.constraints.guard()
        for trie in settings.tries.values():
            self._pipeline.constraints.bound(trie)  # refuses tokens beyond the vocabulary
        self._log_plain_tools()

    def plan_completion(self, body: CompletionBody) -> GenerationPlan:
        """Return the engine requests of /v1/completions; raise ErrorResponse if one is invalid."""
        prompts = body.prompts()
        check_limit("prompt", len(prompts), self._settings.max_prompts, " prompts")
        if body.echo and body.stream and body.logprobs is not None:
            raise bad_request(
                "echo, stream and logprobs cannot be combined: the prompt's log-probabilities are "
                "known only at the end; leave out one of them",
                "echo",
            )
        try:
            src_lang = body.decoding_options().get(SRC_LANG)
            to_ids, adds = self._pipeline.prompts.token_ids, body.add_special_tokens is not False
            tokens = [to_ids(prompt, src_lang, add_special_tokens=adds) for prompt in prompts]
            plan = self._plan(body, tokens, body.best_of, echo=bool(body.echo))
            if not body.echo:
                return plan
            has_none = body.decoding_options().get("max_new_tokens") == 0
            tokenizer = self._pipeline.tokenizer
            text_of = tokenizer.decode if has_none else functools.partial(whole_text, tokenizer)
            texts = tuple(
                prompt if isinstance(prompt, str) else text_of(token_ids)
                for prompt, token_ids in zip(prompts, tokens, strict=True)
            )
            return replace(plan, echoes=texts, drops_new_tokens=has_none)
        except DsbdError as error:
            raise rejection(error) from error

    def plan_chat(self, body: ChatBody) -> GenerationPlan:
        """Return the engine requests of /v1/chat/completions; raise ErrorResponse if invalid."""
        pipeline, has_encoder = self._pipeline, self._pipeline.prompts.encoder is not None
        if has_encoder and pipeline.media is None:
            raise bad_request(
                "this model is an encoder-decoder and has no chats; use /v1/completions with the "
                "source as prompt",
                "messages",
                "no_chats",
            )
        try:
            messages = body.template_messages()
            if has_encoder:  # a picture alone, without a template
                read = pipeline.chat_prompt(messages, limits=self._media)
                return self._plan(body, [read], None, echo=False)
            tools = self._tool_use(body)
            prompt = self._chat_prompt(body, messages, tools)
            plan = self._plan(body, [prompt], None, echo=False, tools=tools)
            return replace(plan, tools=tools)
        except BundleError as error:  # its message names folders of this machine
            raise bad_request(
                "this model has no usable chat template; use /v1/completions",
                "messages",
                "no_chat_template",
            ) from error
        except DsbdError as error:
            raise rejection(error) from error

    def _tool_use(self, body: ChatBody) -> ToolUse | None:
        has_tools = bool(body.tools)
        fault = None if self._speaks_plainly(has_tools) else self._auto_fault(has_tools)
        if fault is not None and self._tag_is_text:
            fault += ", and this server was started with --tool-template own"
        return tool_use(
            body.tools or (),
            body.tool_choice,
            parallel=body.parallel_tool_calls is not False,
            auto_fault=fault,
        )

    def _auto_fault(self, has_tools: bool) -> str | None:
        """Return why the model's own template cannot show tools and calls, None if it can."""
        template = self._pipeline.chat_template.source(has_tools=has_tools)
        return auto_fault(template, self._tag_is_text)

    def _log_plain_tools(self) -> None:
        if self._pipeline.prompts.encoder is not None:
            return  # it cannot chat
        with contextlib.suppress(BundleError):  # the bundle has no chat template
            if self._speaks_plainly(has_tools=True):
                _log.info(
                    "tools of requests are plain text: %s; --tool-template own refuses tool_choice "
                    "auto instead",
                    self._auto_fault(has_tools=True),
                )

    def _speaks_plainly(self, has_tools: bool) -> bool:
        """Return whether calls are plain text in conversations with tools, or without tools."""
        if self._settings.tool_template != PLAIN or not self._tag_is_text:
            return False
        return self._auto_fault(has_tools) is not None

    def _chat_prompt(
        self, body: ChatBody, messages: list[dict[str, Any]], tools: ToolUse | None
    ) -> list[int]:
        ids = functools.partial(
            self._pipeline.chat_prompt,
            add_generation_prompt=body.add_generation_prompt is not False,
            limits=self._media,
        )
        if not messages or not self._speaks_plainly(bool(body.tools)):
            return ids(messages, chat_template_kwargs=_template_variables(body, tools))
        plain, variables = as_text(messages), body.chat_template_kwargs
        if tools is None:
            return ids(plain, chat_template_kwargs=variables)
        text = offer([tool.for_template()["function"] for tool in body.tools or ()])
        try:
            return ids(with_system_text(plain, text), chat_template_kwargs=variables)
        except InputError:  # the template may take no system message
            return ids(with_user_text(plain, text), chat_template_kwargs=variables)

    @functools.cached_property
    def _tag_is_text(self) -> bool:
        tokenizer = self._pipeline.tokenizer
        tokens = tokenizer.encode(CALL_BEGINS, add_special_tokens=False)
        return CALL_BEGINS in tokenizer.decode(tokens)

    def _constraint(self, body: GenerationBody, tools: ToolUse | None) -> Any:
        given: dict[str, Any] = dict(body.given_constraints())
        if tools is not None and given:
            raise contradiction(tools.choice, given)
        if tools is not None and tools.constraint is not None:
            given = {"tools": tools.constraint}
        return read_constraint(given, self._settings.tries, self._pipeline.constraints.bound)

    def _plan(
        self,
        body: GenerationBody,
        tokens: list[list[int]],
        best_of: int | None,
        *,
        echo: bool,
        tools: ToolUse | None = None,
    ) -> GenerationPlan:
        choices = choices_of(body, best_of, self._settings.max_best_of)
        options = self._options(body, choices, echo=echo)
        if (constraint := self._constraint(body, tools)) is not None:
            options["constraint"] = constraint
        options, num_samples, num_copies = for_choices(options, choices)
        for token_ids in tokens:
            check_prompt(len(token_ids), self._settings)
        asked = self._pipeline.resolve(options)
        config = self._pipeline.config(asked)
        limits: list[int | None] = [None] * len(tokens)
        if "max_new_tokens" not in options:
            limits = [self._limit(len(token_ids), config) for token_ids in tokens]
        check_config(_shortened(asked, limits[0]), self._settings)
        configs = with_seeds(config, num_samples)
        num_choices = choices.num_returned if num_samples > 1 else config.num_return_sequences
        return GenerationPlan(
            prompts=tokens,
            configs=[
                self._pipeline.defaults.lengthened(_shortened(each, limit), options, len(token_ids))
                for token_ids, limit in zip(tokens, limits, strict=True)
                for each in configs
            ],
            num_choices=num_choices,
            num_copies=num_copies,
            is_ranked=num_samples > num_choices,
        )

    def _options(self, body: GenerationBody, choices: Choices, *, echo: bool) -> dict[str, Any]:
        """Return the options of an engine request, except those that ``choices`` decide."""
        given = body.decoding_options()
        if echo and given.get("max_new_tokens") == 0:
            given["max_new_tokens"] = 1  # the response drops this token
        given = self._pipeline.prompts.with_language(given)
        self._set_ends(body, given)
        if (num_top := body.num_top_logprobs) is not None:
            given |= {"top_logprobs": num_top, "prompt_logprobs": echo}
        model = self._pipeline.defaults
        options = with_server(given, self._defaults, model, is_beam_search=choices.are_beams)
        options.setdefault("seed", self._new_seed())
        if "num_beams" not in given and options.get("num_beams", 1) > 1:
            if options["num_beams"] < choices.num_beams_needed(options):
                del options["num_beams"]  # the server's default is too small: use what is needed
        return options

    def _limit(self, num_prompt_tokens: int, config: DecodingConfig) -> int:
        """Return ``max_new_tokens`` for a request that does not set it.

        It is the smallest of three: the room in context and cache, the server's limit, and the
        limit of generation_config.json. With a trie it is the length of the longest sequence.
        """
        if config.longest_path is not None:  # never cut; a request without room is refused
            return config.longest_path
        reads_text = self._pipeline.prompts.encoder and not self._pipeline.media
        num_rows = 1 if reads_text else num_prompt_tokens
        most_new_tokens = self._service.most_new_tokens(num_rows, config)
        of_model: int = self._pipeline.defaults.options.get("max_new_tokens", most_new_tokens)
        of_server: int = self._settings.max_new_tokens or most_new_tokens
        return min(most_new_tokens, of_model, of_server)

    def _set_ends(self, body: GenerationBody, options: dict[str, Any]) -> None:
        given = options.get("eos_token_id")
        if body.ignore_eos and given:
            raise bad_request(
                f"ignore_eos contradicts eos_token_id {given}; leave out one of them", "ignore_eos"
            )
        if not (body.ignore_eos or body.stop_token_ids):
            return
        ends_of_model = (
            () if body.ignore_eos else self._pipeline.bundle.manifest.target.eos_token_ids
        )
        ends = ends_of_model if given is None else [given] if isinstance(given, int) else given
        options["eos_token_id"] = list(dict.fromkeys([*ends, *(body.stop_token_ids or ())]))


def _shortened(config: DecodingConfig, max_new_tokens: int | None) -> DecodingConfig:
    return config if max_new_tokens is None else replace(config, max_new_tokens=max_new_tokens)


def _template_variables(body: ChatBody, tools: ToolUse | None) -> dict[str, Any] | None:
    variables = body.chat_template_kwargs
    if tools is None:
        return variables
    if variables and "tools" in variables:
        raise bad_request(
            "tools and chat_template_kwargs.tools are both given; leave out one of them",
            "chat_template_kwargs",
        )
    described = [tool.for_template() for tool in body.tools or ()]
    return {**(variables or {}), "tools": described}
