"""Engine requests that answer one HTTP request: prompts, options, strategy, seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.completions import CompletionBody
from dsbd_ort.openai_server.errors import bad_request, rejection
from dsbd_ort.openai_server.protocol import GenerationBody
from dsbd_ort.openai_server.settings import (
    ServingSettings,
    check_config,
    check_limit,
    check_prompt,
)
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.prompts import prompt_ids
from dsbd_runtime.errors import BundleError

_DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One request to the service.

    Attributes:
        prompt_index: of the prompt among those of the HTTP request.
        token_ids: of the prompt.
        options: fields of DecodingConfig; strategy and seed are always given.
    """

    prompt_index: int
    token_ids: list[int]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """All engine requests of one HTTP request.

    Attributes:
        engine_requests: those of the first prompt, then those of the next.
        num_choices: sequences to return for each prompt.
        num_prompt_tokens: of all prompts.
    """

    engine_requests: tuple[EngineRequest, ...]
    num_choices: int
    num_prompt_tokens: int

    @property
    def seed(self) -> int:
        """Seed of the first engine request; the seeds of a prompt's others count up from it."""
        return int(self.engine_requests[0].options["seed"])

    @property
    def strategy(self) -> str:
        """Strategy of all engine requests."""
        return str(self.engine_requests[0].options["strategy"])


class Planner:
    """Plans requests within the limits of a server; it tokenizes: call it off the event loop."""

    def __init__(
        self, pipeline: Pipeline, settings: ServingSettings, new_seed: Callable[[], int]
    ) -> None:
        """``new_seed`` returns the seed of a request that has none."""
        self._pipeline = pipeline
        self._settings = settings
        self._new_seed = new_seed

    def plan_completion(self, body: CompletionBody) -> GenerationPlan:
        """Return the engine requests of /v1/completions.

        Raises:
            ErrorResponse: the request is invalid or exceeds a limit.
        """
        if body.logprobs not in (None, 0, 1):
            raise bad_request(
                f"logprobs is {body.logprobs}, only those of the chosen tokens are supported; use "
                "0 or 1",
                "logprobs",
                "unsupported",
            )
        prompts = body.prompts()
        check_limit("prompt", len(prompts), self._settings.max_prompts, " prompts")
        try:
            return self._plan(body, prompts, body.best_of)
        except DsbdError as error:
            raise rejection(error) from error

    def plan_chat(self, body: ChatBody) -> GenerationPlan:
        """Return the engine requests of /v1/chat/completions; raises as ``plan_completion``."""
        messages = body.template_messages()
        try:
            prompt = self._pipeline.chat_prompt(messages)
            return self._plan(body, [prompt], None)
        except BundleError as error:  # its message names folders of this machine
            raise bad_request(
                "this model has no usable chat template; use /v1/completions",
                "messages",
                "no_chat_template",
            ) from error
        except DsbdError as error:
            raise rejection(error) from error

    def _plan(
        self, body: GenerationBody, prompts: Sequence[str | list[int]], best_of: int | None
    ) -> GenerationPlan:
        each_options, num_choices = self._options(body, best_of)
        check_config(DecodingConfig.from_options(each_options[0]), self._settings)
        tokens = [prompt_ids(self._pipeline.tokenizer, prompt) for prompt in prompts]
        for token_ids in tokens:
            check_prompt(len(token_ids), self._settings)
        return GenerationPlan(
            engine_requests=tuple(
                EngineRequest(prompt_index=index, token_ids=token_ids, options=options)
                for index, token_ids in enumerate(tokens)
                for options in each_options
            ),
            num_choices=num_choices,
            num_prompt_tokens=sum(map(len, tokens)),
        )

    def _options(
        self, body: GenerationBody, best_of: int | None
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the options of each engine request of one prompt, and the choices to return.

        A strategy with beams takes ``best_of`` from the beams of one engine request; others make
        ``best_of`` engine requests with consecutive seeds.
        """
        options = body.decoding_options()
        num_choices = options.pop("num_return_sequences", 1)
        num_tried = num_choices if best_of is None else best_of
        check_limit("n", max(num_tried, num_choices), self._settings.max_best_of, " sequences")
        if num_tried < num_choices:
            message = f"best_of is {num_tried}, less than n {num_choices}; raise it"
            raise bad_request(message, "best_of")
        if body.stream and num_tried > num_choices:
            raise bad_request(
                f"best_of is {num_tried}, more than n {num_choices}: the best are known only at "
                "the end; leave out stream or best_of",
                "best_of",
            )
        default_new_tokens = min(_DEFAULT_NEW_TOKENS, self._settings.max_new_tokens)
        options.setdefault("max_new_tokens", default_new_tokens)
        options.setdefault("seed", self._new_seed())
        _choose_strategy(options, num_tried)
        if DecodingConfig(strategy=options["strategy"]).row.has_beams:
            return [_with_beams(options, num_choices, num_tried)], num_choices
        return _with_seeds(options, num_tried), num_choices


def _choose_strategy(options: dict[str, Any], num_tried: int) -> None:
    """Set the default strategy: dsbd, which samples, or its greedy counterpart at temperature 0."""
    if "strategy" not in options and options.get("temperature") == 0:
        options["strategy"] = "speculative-beam-search"
        options.setdefault("num_beams", num_tried)
    options.setdefault("strategy", "dsbd")


def _with_beams(options: dict[str, Any], num_choices: int, num_tried: int) -> dict[str, Any]:
    """Return the options with at least ``num_tried`` beams, ``num_choices`` of them returned."""
    default_width = DecodingConfig(strategy=options["strategy"]).width
    width = options.get("num_beams", max(default_width, num_tried))
    if isinstance(width, int) and width < num_tried:
        raise bad_request(
            f"num_beams is {width}, but n or best_of is {num_tried}; raise num_beams or leave it "
            "out",
            "num_beams",
        )
    options = {**options, "num_beams": width}
    if num_choices > DecodingConfig.from_options(options).smallest_width:  # of a dynamic width
        options.setdefault("min_beams", num_choices)
    return {**options, "num_return_sequences": num_choices}


def _with_seeds(options: dict[str, Any], num_tried: int) -> list[dict[str, Any]]:
    """Return the options of each of ``num_tried`` engine requests, which differ in their seeds."""
    rule = DecodingConfig(strategy=options["strategy"]).row.rule
    if num_tried > 1 and rule in ("search", "joint-greedy"):
        raise bad_request(
            f"n or best_of is {num_tried}, but strategy {options['strategy']} does not sample: all "
            "sequences would be equal; use 1, or a strategy that samples or has beams",
            "n",
        )
    return [{**options, "seed": options["seed"] + i} for i in range(num_tried)]
