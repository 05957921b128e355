"""The keyword arguments of a request, typed so that an editor completes them and mypy checks them.

They are the fields of DecodingConfig, none of them required (a test keeps them equal); or one
``config`` stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from dsbd_ort.decoding import ConfigError, DecodingConfig

Prompt = str | Sequence[int]
"""Text, or token ids."""

Prompts = list[str] | list[list[int]]
"""Several of them; a list of ints is one prompt."""

Options = Mapping[str, Any] | DecodingConfig
"""The options that a caller gives, or a config that is taken as it is."""


class RequestOptions(TypedDict, total=False):
    """The fields of DecodingConfig as keyword arguments; see there."""

    strategy: str | None
    num_beams: int | None
    coupling: Literal["gumbel", "rejection"] | None
    width_policy: Literal["fixed", "threshold"] | None
    min_beams: int | None
    accept_threshold: float
    drafter: Literal["model", "ngram", "model+ngram", "none"] | None
    draft_policy: Literal["fixed", "throughput"] | None
    draft_length: int | None
    draft_beams: int | Sequence[int] | None
    memory: Literal["forest", "single"]
    replacement: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    encoder_no_repeat_ngram_size: int
    bad_words_ids: Sequence[int | Sequence[int]]
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    no_timestamps_token_id: int | None
    max_initial_timestamp_index: int | None
    last_timestamp_token_id: int | None
    min_new_tokens: int
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    constraint: Any
    logits_processors: Sequence[Any]
    max_new_tokens: int
    seed: int | None
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    joint_threshold: float | None
    joint_tokens: int | None
    joint_beams: int | None
    stop_strings: str | Sequence[str] | None
    eos_token_id: int | Sequence[int] | None
    top_logprobs: int
    prompt_logprobs: bool
    skip_special_tokens: bool


def given_options(config: DecodingConfig | None, options: Mapping[str, Any]) -> Options:
    """Return the config, or else the keyword arguments; refuse both together."""
    if config is None:
        return options
    if options:
        raise ConfigError(
            f"config and {', '.join(sorted(options))} are both given; set the options in the "
            "config (dataclasses.replace), or leave it out"
        )
    return config


def is_given(name: str, options: Options) -> bool:
    """Return whether a caller gave an option; a config gives all."""
    return isinstance(options, DecodingConfig) or name in options


def is_several(prompt: object) -> bool:
    """Return whether a prompt is a list of prompts: of texts, or of lists of token ids."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | list | tuple)
