"""What a request may not ask for: every refusal names the field, the value and the mend."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.strategies import STRATEGIES

if TYPE_CHECKING:
    from dsbd_ort.decoding.config import DecodingConfig

MOST_BEAMS = MOST_LAYERS = 1024
_MOST_NODES = 16_384  # of a forest, whose mask has a cell for every pair of nodes
_MOST = 2**31 - 1
_WHOLE = {  # name: (lowest, highest)
    "min_beams": (1, MOST_BEAMS),
    "top_k": (0, _MOST),
    "max_new_tokens": (1, _MOST),
    "seed": (0, 2**128 - 1),
    "num_return_sequences": (1, MOST_BEAMS),
    "joint_tokens": (1, _MOST),
    "joint_beams": (1, MOST_BEAMS),
}
_LARGEST = sys.float_info.max
_RANGES = {  # name: (lowest, highest, whether the lowest itself is excluded)
    "accept_threshold": (0.0, 1.0, False),
    "temperature": (0.0, _LARGEST, False),
    "top_p": (0.0, 1.0, True),
    "length_penalty": (-30.0, 30.0, False),  # num_new_tokens to the power of it stays finite
    "joint_threshold": (0.0, _LARGEST, True),
}
_OPTIONAL = ("joint_threshold", "joint_tokens", "joint_beams")
_LEAST_TEMPERATURE = 1e-6  # a logit divided by it stays finite
_CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "coupling": ("gumbel", "rejection", None),
    "width_policy": ("fixed", "threshold"),
    "draft_policy": ("fixed", "throughput"),
    "memory": ("forest", "single"),
    "replacement": (False, True),
    "early_stopping": (False, True, "never"),
}


def check_strategy(config: DecodingConfig) -> None:
    """Refuse what is no strategy's name."""
    name = config.strategy
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigError(f"strategy is {_short(name)}; expected one of {', '.join(STRATEGIES)}")


def check_whole(config: DecodingConfig, name: str, least: int, most: int) -> None:
    """Refuse a field that is not a whole number from ``least`` to ``most``."""
    value = getattr(config, name)
    if not _is_whole(value):
        raise ConfigError(f"{name} is {_short(value)}; expected a whole number")
    if value < least:
        raise ConfigError(f"{name} is {_short(value)}; expected at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {_short(value)}; expected at most {most}")


def check_sequences(config: DecodingConfig) -> None:
    """Refuse a field of a single value or several that is neither."""
    beams, eos = config.draft_beams, config.eos_token_id
    if beams is not None and not _is_whole(beams) and not isinstance(beams, list | tuple):
        raise ConfigError(
            f"draft_beams is {_short(beams)}; expected a whole number, or a list of one a layer"
        )
    many = eos if isinstance(eos, list | tuple | set | frozenset) else [eos]
    if eos is not None and not all(_is_whole(i) and i >= 0 for i in many):
        raise ConfigError(f"eos_token_id is {_short(eos)}; expected token ids >= 0")


def check_ranges(config: DecodingConfig) -> None:
    """Refuse values that no strategy takes."""
    for name, (least, most) in _WHOLE.items():
        if name not in _OPTIONAL or getattr(config, name) is not None:
            check_whole(config, name, least, most)
    for name, (low, high, is_open) in _RANGES.items():
        value = getattr(config, name)
        if name in _OPTIONAL and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {_short(value)}; expected a number")
        if not low <= value <= high or (is_open and value == low):
            above = "more than" if is_open else "at least"
            raise ConfigError(
                f"{name} is {_short(value)}; expected a number {above} {low}, up to {high}"
            )
    if 0.0 < config.temperature < _LEAST_TEMPERATURE:
        raise ConfigError(
            f"temperature is {config.temperature}; expected 0 or at least {_LEAST_TEMPERATURE}"
        )
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if not isinstance(value, str | bool | None) or value not in choices:
            names = ", ".join(repr(choice) for choice in choices if choice is not None)
            raise ConfigError(f"{name} is {_short(value)}; expected one of {names}")
    _check_stop_strings(config)


def _check_stop_strings(config: DecodingConfig) -> None:
    stop = config.stop_strings
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop_strings is {_short(stop)}; expected a text or a list of texts")
    for text in texts:
        if not text:
            raise ConfigError("stop_strings has an empty text, which every text contains; drop it")
        if "\N{REPLACEMENT CHARACTER}" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError(
                f"stop_strings has {text!r}, with U+FFFD or a lone surrogate, which no finished "
                "text holds; drop it"
            )


def check_combinations(config: DecodingConfig) -> None:
    """Refuse fields that contradict each other or mean nothing to the strategy."""
    name, row = config.strategy, config.row
    if not row.has_beams and config.width != 1:
        raise ConfigError(
            f"num_beams is {config.width}, but strategy {name} has one beam; use num_beams 1 or "
            "a beam strategy such as beam-sample"
        )
    if not row.has_draft and config.draft_length:
        raise ConfigError(
            f"draft_length is {config.draft_length}, but strategy {name} drafts nothing; leave "
            "it out or use dsbd"
        )
    if config.min_beams > config.width:  # type: ignore[operator]
        raise ConfigError(
            f"min_beams is {config.min_beams}, more than num_beams {config.width}; lower it"
        )
    if config.num_return_sequences > config.smallest_width:
        raise ConfigError(
            f"num_return_sequences is {config.num_return_sequences}, but as few as "
            f"{config.smallest_width} beams may be kept; lower it, or raise num_beams or min_beams"
        )
    if config.width_policy == "threshold" and not (row.rule == "sample" and row.has_draft):
        raise ConfigError(
            f"width_policy is 'threshold', but strategy {name} accepts no drawn beams of a "
            "draft; use 'fixed' or strategy dsbd"
        )
    if config.memory == "single" and name != "dsbd":
        raise ConfigError(f"memory is 'single', but strategy {name} is not dsbd; use 'forest'")
    if config.memory == "single" and config.num_return_sequences > 1:
        raise ConfigError(
            f"num_return_sequences is {config.num_return_sequences}, but memory 'single' ends "
            "with one beam; use 1 or memory 'forest'"
        )
    _check_rule_fields(config)
    if config.draft_policy == "throughput":
        _check_throughput(config)
    _check_draft_beams(config)


def _check_rule_fields(config: DecodingConfig) -> None:
    """Refuse a field that was given but belongs to another rule."""
    rule = config.row.rule
    samples = rule == "sample"
    if samples and config.temperature == 0.0:
        raise ConfigError(
            f"temperature is 0, but strategy {config.strategy} samples; use more than 0, or "
            "beam-search, speculative-beam-search or greedy"
        )
    is_search = rule == "search"
    misplaced = {  # field: (is given where it means nothing, the mend)
        "coupling": (not samples and config.coupling is not None, "leave it out"),
        "replacement": (not samples and config.replacement, "use False"),
        "temperature": (is_search and config.temperature not in (0.0, 1.0), "use 1 or 0"),
        "top_k": (is_search and config.top_k != 0, "use 0"),
        "top_p": (is_search and config.top_p != 1.0, "use 1"),
        "early_stopping": (not is_search and config.early_stopping is not False, "use False"),
        "joint_threshold": (rule != "joint" and config.joint_threshold is not None, "use mjsd"),
        "joint_tokens": (rule != "joint-greedy" and config.joint_tokens is not None, "use mjgd"),
        "joint_beams": (rule != "joint-greedy" and config.joint_beams is not None, "use mjgd"),
    }
    for field, (is_misplaced, mend) in misplaced.items():
        if is_misplaced:
            raise ConfigError(
                f"{field} is {getattr(config, field)!r}, which means nothing to strategy "
                f"{config.strategy}; {mend}"
            )


def _check_throughput(config: DecodingConfig) -> None:
    """Refuse what would let the output depend on how much was drafted."""
    row = config.row
    needed = {  # field: (what it must be, whether it is)
        "strategy": ("one with a draft, such as dsbd", row.has_draft and row.rule != "joint"),
        "coupling": ("'gumbel'", config.coupling in ("gumbel", None)),
        "width_policy": ("'fixed'", config.width_policy == "fixed"),
        "memory": ("'forest'", config.memory == "forest"),
        "replacement": ("False", not config.replacement),
    }
    for field, (wanted, is_met) in needed.items():
        if not is_met:
            raise ConfigError(
                f"{field} is {getattr(config, field)!r}, but draft_policy 'throughput' needs an "
                f"output that does not depend on the draft: expected {wanted}; or use "
                "draft_policy 'fixed'"
            )


def _check_draft_beams(config: DecodingConfig) -> None:
    widths = config.layer_widths
    if len(widths) != config.draft_length:
        raise ConfigError(
            f"draft_beams {widths} has {len(widths)} layers, draft_length is "
            f"{config.draft_length}; give one number per layer or one for all"
        )
    for width in widths:
        if not _is_whole(width):
            raise ConfigError(f"draft_beams has a layer of {_short(width)}; expected whole numbers")
        if width < config.smallest_width:
            raise ConfigError(
                f"draft_beams has a layer of {width}, narrower than {config.smallest_width}, "
                "the fewest beams that are kept: it could never be accepted; widen it, or "
                "lower min_beams with width_policy 'threshold'"
            )
        if width != 1 and not config.row.has_draft_tree:
            raise ConfigError(
                f"draft_beams is {width}, but strategy {config.strategy} drafts one path; use 1"
            )
    if sum(widths) > _MOST_NODES:
        raise ConfigError(
            f"draft_beams and draft_length make a forest of {_short(sum(widths))} candidates; "
            f"expected at most {_MOST_NODES}: lower one of them"
        )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    """Return at most 80 characters that show a value."""
    if isinstance(value, int) and value.bit_length() > 256:  # too long for repr, by default
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # nested too deep, or with such a number inside
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
