"""From a body to the options of its engine requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.openai_server.neutral_fields import without_neutral
from dsbd_ort.openai_server.protocol import OPENAI_NAMES, OPTION_NAMES, GenerationBody
from dsbd_ort.openai_server.refusal import bad_request
from dsbd_ort.openai_server.request_limits import check_most

USUAL_NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a body asks of every one of its prompts.

    Attributes:
        options: of each engine request, fields of DecodingConfig, one a request of the prompt.
        num_choices: sequences to return.
    """

    options: tuple[dict[str, Any], ...]
    num_choices: int

    @property
    def seed(self) -> int:
        """The seed of the first engine request."""
        return int(self.options[0]["seed"])

    @property
    def strategy(self) -> str:
        """The strategy of all of them."""
        return str(self.options[0]["strategy"])


def request_options(
    body: GenerationBody,
    *,
    best_of: int | None,
    most_new_tokens: int,
    new_seed: Callable[[], int],
    most_tried: int,
) -> RequestOptions:
    """Return what a body asks for.

    Beams are what strategies with beams choose the best of; the others are asked ``best_of``
    times, with the seeds after one another.

    Raises:
        Refusal: an unknown field, one that cannot be done, or two that contradict each other.
        ConfigError: options that DecodingConfig refuses.
    """
    options = _named_options(body)
    num_choices = options.pop("num_return_sequences", 1)
    num_tried = num_choices if best_of is None else best_of
    check_most("n", max(num_tried, num_choices), most_tried)
    if num_tried < num_choices:
        raise bad_request(f"best_of is {num_tried}, less than n {num_choices}; raise it", "best_of")
    if body.stream and num_tried > num_choices:
        raise bad_request(
            f"best_of is {num_tried}, more than n {num_choices}: which are best is known at the "
            "end alone; leave out stream or best_of",
            "best_of",
        )
    options.setdefault("max_new_tokens", min(USUAL_NEW_TOKENS, most_new_tokens))
    options.setdefault("seed", new_seed())
    _choose_strategy(options, num_tried)
    if DecodingConfig(strategy=options["strategy"]).row.has_beams:
        return RequestOptions(
            options=(_with_beams(options, num_choices, num_tried),), num_choices=num_choices
        )
    return RequestOptions(options=_with_seeds(options, num_tried), num_choices=num_choices)


def _named_options(body: GenerationBody) -> dict[str, Any]:
    """Return what was given by DecodingConfig's names; no name twice with different values."""
    options = without_neutral(body.further_fields())
    if unknown := sorted(set(options) - OPTION_NAMES):
        raise bad_request(f"unknown field {unknown[0]!r}; see docs/serving.md", unknown[0])
    for theirs, ours in OPENAI_NAMES.items():
        value = getattr(body, theirs)
        if value is None:
            continue
        if ours in options and options[ours] != value:
            raise bad_request(f"{theirs} contradicts another name of {ours}; give one", theirs)
        options[ours] = value
    return options


def _choose_strategy(options: dict[str, Any], num_tried: int) -> None:
    """Without a strategy it is dsbd, which samples; at temperature 0 its greedy counterpart."""
    if "strategy" not in options and options.get("temperature") == 0:
        options["strategy"] = "speculative-beam-search"
        options.setdefault("num_beams", num_tried)
    options.setdefault("strategy", "dsbd")


def _with_beams(options: dict[str, Any], num_choices: int, num_tried: int) -> dict[str, Any]:
    """Return the options with as many beams as sequences are tried, and kept as are returned."""
    usual = DecodingConfig(strategy=options["strategy"]).width
    width = options.get("num_beams", max(usual, num_tried))
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


def _with_seeds(options: dict[str, Any], num_tried: int) -> tuple[dict[str, Any], ...]:
    """Return the options of each of ``num_tried`` requests, which differ in their seeds."""
    rule = DecodingConfig(strategy=options["strategy"]).row.rule
    if num_tried > 1 and rule in ("search", "joint-greedy"):
        raise bad_request(
            f"n or best_of is {num_tried}, but strategy {options['strategy']} draws nothing: all "
            "would be the same; use 1, or a strategy that samples or has beams",
            "n",
        )
    return tuple({**options, "seed": options["seed"] + i} for i in range(num_tried))
