"""Options of the requests that leave them out: the server's own.

What a request sends counts before them; the bundle's generation_config.json and the table of
options after them (``ModelDefaults``). Only what a request sends is refused: a default that means
nothing to its strategy, or contradicts its other options, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingConfig
from dsbd_ort.decoding.option_table import OPTION_TABLE
from dsbd_ort.decoding.strategies import unnamed_strategy

NEVER_DEFAULTS = (
    "max_new_tokens",
    "num_return_sequences",
    "top_logprobs",
    "prompt_logprobs",
    "constraint",
)
"""Options of which a server has no default: its limit is one, or a request has other fields."""


class DefaultOptions:
    """The options that a server was started with.

    Attributes:
        strategy: of requests that name none and do not set temperature 0. A single beam streams
            evenly, so without an option it is ``speculative``.
        strategy_of_beams: the same, of requests that set how many beams.
        names_strategy: whether the server was started with a strategy.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Take the options, by the names of DecodingConfig.

        Raises:
            ConfigError: they are invalid, or contradict each other.
        """
        self._given = {name: given[name] for name in OPTION_TABLE if name in given}
        self.names_strategy = "strategy" in given
        self.strategy = given.get("strategy", "speculative")
        DecodingConfig.from_options(
            dict(given) if "strategy" in given else unnamed_strategy(self.strategy, given)
        )
        self._given.pop("strategy", None)
        has_beams = STRATEGIES[self.strategy].has_beams
        self.strategy_of_beams = self.strategy if has_beams else "dsbd"

    def filled(self, options: Mapping[str, Any], strategy: str | None = None) -> dict[str, Any]:
        """Return the options of a request with those of the server that it leaves out.

        strategy: instead of the server's, where the request names none.
        """
        filled = dict(options)
        if "strategy" not in filled:
            temperature = filled.get("temperature", self._given.get("temperature"))
            own = self.strategy_of_beams if _sets_beams(options) else self.strategy
            decided = unnamed_strategy(strategy or own, {"temperature": temperature})
            width = {"num_beams": decided["num_beams"]} if "num_beams" in decided else {}
            filled = {**width, **filled, "strategy": decided["strategy"]}
        if len(self._given) > 1 and (all_filled := self._all_filled(filled)) is not None:
            return all_filled
        for name, value in self._given.items():
            if name not in filled and _is_read(name, {**filled, name: value}):
                filled[name] = value
        return filled

    def _all_filled(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the options with all that they leave out, None where one of it is not read."""
        filled = {**self._given, **options}
        try:
            config = DecodingConfig.from_options(filled)
        except ConfigError:
            return None
        left_out = self._given.keys() - options.keys()
        is_read = all(OPTION_TABLE[name].unmet(config) is None for name in left_out)
        return filled if is_read else None


def _sets_beams(options: Mapping[str, Any]) -> bool:
    return any(options.get(name, 1) != 1 for name in ("num_beams", "num_return_sequences"))


def _is_read(name: str, options: dict[str, Any]) -> bool:
    """Return whether an option means something beside the others, and contradicts none."""
    try:
        config = DecodingConfig.from_options(options)
    except ConfigError:
        return False
    return OPTION_TABLE[name].unmet(config) is None
