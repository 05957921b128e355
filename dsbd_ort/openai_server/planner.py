"""From a body to the engine requests that answer it; touches the tokenizer, so not for the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.openai_server.errors import refusal_of
from dsbd_ort.openai_server.neutral_fields import check_messages
from dsbd_ort.openai_server.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    PromptField,
)
from dsbd_ort.openai_server.refusal import bad_request
from dsbd_ort.openai_server.request_limits import check_config, check_most, check_prompt
from dsbd_ort.openai_server.request_options import RequestOptions, request_options
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.prompt_ids import prompt_ids
from dsbd_runtime.errors import BundleError


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One engine request.

    Attributes:
        prompt_index: the prompt of the body that it continues.
        token_ids: that prompt.
        options: fields of DecodingConfig.
    """

    prompt_index: int
    token_ids: list[int]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """All engine requests of one body.

    Attributes:
        submissions: those of the first prompt, then those of the next.
        num_choices: sequences to return for each prompt.
        num_prompt_tokens: of all prompts.
        seed, strategy: of the first engine request; the seeds of further ones count up from it.
    """

    submissions: tuple[Submission, ...]
    num_choices: int
    num_prompt_tokens: int
    seed: int
    strategy: str


class Planner:
    """Makes plans under the limits of a server."""

    def __init__(
        self, pipeline: Pipeline, settings: ServingSettings, new_seed: Callable[[], int]
    ) -> None:
        """``new_seed`` is asked where a body names no seed."""
        self._pipeline = pipeline
        self._settings = settings
        self._new_seed = new_seed

    def of_completion(self, body: CompletionBody) -> GenerationPlan:
        """Return what answers /v1/completions.

        Raises:
            Refusal: the body asks for what cannot be done.
        """
        if body.logprobs is not None and body.logprobs not in (0, 1):
            raise bad_request(
                f"logprobs is {body.logprobs}, but there are those of the chosen tokens alone; "
                "use 0 or 1",
                "logprobs",
                "unsupported",
            )
        prompts = _prompts_of(body.prompt)
        check_most("prompt", len(prompts), self._settings.max_prompts)
        try:
            return self._plan(body, prompts, body.best_of)
        except DsbdError as error:
            raise refusal_of(error) from error

    def of_chat(self, body: ChatBody) -> GenerationPlan:
        """Return what answers /v1/chat/completions; raises as ``of_completion``."""
        check_messages([message.model_extra for message in body.messages])
        try:
            prompt = self._pipeline.chat_prompt([message.plain() for message in body.messages])
            return self._plan(body, [prompt], None)
        except BundleError as error:  # whose message names folders of this machine
            raise bad_request(
                "this model has no usable chat template; use /v1/completions",
                "messages",
                "no_chat_template",
            ) from error
        except DsbdError as error:
            raise refusal_of(error) from error

    def _plan(
        self, body: GenerationBody, prompts: Sequence[str | list[int]], best_of: int | None
    ) -> GenerationPlan:
        settings = self._settings
        wanted = request_options(
            body,
            best_of=best_of,
            most_new_tokens=settings.max_new_tokens,
            new_seed=self._new_seed,
            most_tried=settings.max_best_of,
        )
        check_config(DecodingConfig.from_options(wanted.options[0]), settings)
        tokens = [prompt_ids(self._pipeline.tokenizer, prompt) for prompt in prompts]
        for token_ids in tokens:
            check_prompt(len(token_ids), settings)
        return _plan_of(tokens, wanted)


def _plan_of(tokens: list[list[int]], wanted: RequestOptions) -> GenerationPlan:
    return GenerationPlan(
        submissions=tuple(
            Submission(prompt_index=index, token_ids=token_ids, options=options)
            for index, token_ids in enumerate(tokens)
            for options in wanted.options
        ),
        num_choices=wanted.num_choices,
        num_prompt_tokens=sum(map(len, tokens)),
        seed=wanted.seed,
        strategy=wanted.strategy,
    )


def _prompts_of(prompt: PromptField) -> list[str | list[int]]:
    """Return the prompts of a body, one for each text or list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is an empty list; give a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
