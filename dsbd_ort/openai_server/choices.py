"""Numbers of sequences that a request generates and returns, and checks of a server's limits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from dsbd_ort.decoding.noise import sample_seed
from dsbd_ort.decoding.option_table import USUAL_BEAMS
from dsbd_ort.engine.limits import MOST
from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.protocol import GenerationBody
from dsbd_ort.openai_server.settings import ServingSettings

_MAX_STOPS, _MAX_STOP_CHARACTERS, _MAX_EOS_IDS = 16, 256, 64


def check_config(config: DecodingConfig, settings: ServingSettings) -> None:
    """Raise ErrorResponse for options that cost more than the server allows."""
    joint_tokens = config.joint_tokens if config.row.rule == "joint-greedy" else 0
    longest_stop = max(map(len, config.stop_strings), default=0)
    draft_nodes = " candidates over all draft layers"
    num_drafted = sum(config.layer_widths) if config.draft_policy else 0  # else chosen later
    for name, value, limit, unit in (
        ("max_new_tokens", config.max_new_tokens, settings.max_new_tokens or MOST, ""),
        ("num_beams", config.num_beams, settings.max_beams, ""),
        ("joint_beams", config.widest_search, settings.max_beams, ""),
        ("joint_tokens", joint_tokens, settings.max_draft_nodes, ""),
        ("draft_beams", num_drafted, settings.max_draft_nodes, draft_nodes),
        ("stop", len(config.stop_strings), _MAX_STOPS, " stop texts"),
        ("stop", longest_stop, _MAX_STOP_CHARACTERS, " characters in one stop text"),
        ("eos_token_id", len(config.eos_ids), _MAX_EOS_IDS, " token ids"),
    ):
        check_limit(name, value, limit, unit)


def check_prompt(num_tokens: int, settings: ServingSettings) -> None:
    """Reject a prompt that is longer than the server allows."""
    limit = settings.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise bad_request(
            f"the prompt is too long: it has {num_tokens} tokens, which exceeds the available "
            f"context size: this server allows {limit}; shorten it",
            "prompt",
            "context_length_exceeded",
        )


def check_limit(name: str, value: int, limit: int, unit: str = "") -> None:
    """Reject a field that exceeds a limit; ``unit`` follows the value in the message."""
    if value > limit:
        raise bad_request(
            f"{name} amounts to {value}{unit}, this server allows {limit}; lower it",
            name,
            "limit_exceeded",
        )


@dataclass(frozen=True)
class Choices:
    """How many sequences a request generates for each prompt, and how many it returns.

    ``num_returned`` is ``n``, ``num_tried`` ``best_of``, ``are_beams`` ``use_beam_search``.
    """

    num_returned: int
    num_tried: int
    are_beams: bool

    def num_beams_needed(self, options: Mapping[str, Any]) -> int:
        """Return how many beams one engine request needs, to be returned or tried."""
        row = STRATEGIES.get(options["strategy"])
        num_tried = self.num_tried if row is not None and row.rule == "search" else 1
        num_returned: int = options.get("num_return_sequences", 1)
        return max(num_tried, num_returned)


def choices_of(body: GenerationBody, best_of: int | None, most_tried: int) -> Choices:
    """Return the numbers of sequences to generate and return; ``most_tried``: a server's limit."""
    num_returned = body.n or 1
    num_tried = num_returned if best_of is None else best_of
    counts = {"n": num_returned, "best_of": num_tried}
    counts["num_return_sequences"] = body.num_return_sequences or 1
    largest = max(counts, key=counts.__getitem__)
    check_limit(largest, counts[largest], most_tried, " sequences")
    if num_tried < num_returned:
        message = f"best_of is {num_tried}, less than n {num_returned}; raise it"
        raise bad_request(message, "best_of")
    if body.stream and num_tried > num_returned:
        raise bad_request(
            f"best_of is {num_tried}, more than n {num_returned}, and stream is true: the best "
            "sequences are known only at the end; leave out stream or best_of",
            "best_of",
        )
    return Choices(num_returned, num_tried, bool(body.use_beam_search))


def for_choices(options: dict[str, Any], choices: Choices) -> tuple[dict[str, Any], int, int]:
    """Return the options, the number of engine requests of one prompt, and the copies of each.

    * A beam search is one engine request; its beams are the sequences.
    * Any other strategy without randomness is one engine request, returned ``n`` times.
    * All others are ``best_of`` engine requests with different seeds. Several beams of one of them
      are returned only if ``num_return_sequences`` requests them.
    """
    row = STRATEGIES.get(options["strategy"]) if isinstance(options["strategy"], str) else None
    if row is None:
        return options, 1, 1  # DecodingConfig refuses it and lists the strategies
    if choices.are_beams and row.rule != "search":
        raise bad_request(
            f"use_beam_search is true, but strategy is {options['strategy']}; leave one of them "
            "out, or set strategy to beam-search or speculative-beam-search",
            "use_beam_search",
        )
    num_beams_returned = options.get("num_return_sequences", 1)
    is_search = row.rule == "search" and row.has_beams
    if choices.num_tried > 1 and num_beams_returned > 1:
        if not (is_search and num_beams_returned == choices.num_returned):
            raise bad_request(
                f"n or best_of is {choices.num_tried} and num_return_sequences "
                f"{num_beams_returned}: the first count samples, the second beams of one request; "
                "leave one of them out",
                "num_return_sequences",
            )
    if is_search and options.get("num_beams") != 1:
        num_returned = max(choices.num_returned, num_beams_returned)
        return _with_beams(options, num_returned, max(choices.num_tried, num_returned)), 1, 1
    if row.rule in ("search", "joint-greedy") or options.get("temperature") == 0:
        return options, 1, choices.num_returned
    if num_beams_returned > 1:
        return _with_beams(options, num_beams_returned, num_beams_returned), 1, 1
    return options, choices.num_tried, 1


def _with_beams(options: dict[str, Any], num_returned: int, num_tried: int) -> dict[str, Any]:
    """Return the options with at least ``num_tried`` beams, ``num_returned`` of them returned."""
    row = STRATEGIES[options["strategy"]]
    if not row.has_beams:
        return options  # DecodingConfig refuses num_return_sequences
    width = options.get("num_beams", max(USUAL_BEAMS, num_tried))
    if isinstance(width, int) and width < num_tried:
        raise bad_request(
            f"num_beams is {width}, but {num_tried} sequences are returned or tried; raise "
            "num_beams or leave it out",
            "num_beams",
        )
    options = {**options, "num_beams": width}
    options.pop("num_return_sequences", None)
    if any(name in options for name in ("width_policy", "accept_threshold")):
        # The policy may keep half of the beams, but must keep all beams that are returned.
        if num_returned > DecodingConfig(**options).smallest_width:
            options.setdefault("min_beams", num_returned)
    return {**options, "num_return_sequences": num_returned}


def with_seeds(config: DecodingConfig, num_samples: int) -> list[DecodingConfig]:
    """Return a config per seed; only the first one returns log-probabilities of the prompt."""
    if num_samples == 1:
        return [config]
    assert config.seed is not None  # decided by ``Pipeline.config``
    seeds = [sample_seed(config.seed, index) for index in range(num_samples)]
    later = [replace(config, seed=seed, prompt_logprobs=False) for seed in seeds[1:]]
    return [replace(config, seed=seeds[0]), *later]
