"""From the options that a caller gives to the config of the request.

Of each option the first of these is used: what the caller gives; the server's own default; the
model's, of its generation_config.json; the usual one of chats; the default of the table. Only what
the caller gives is refused: a default that means nothing to the strategy, or contradicts the other
options, is left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingConfig
from dsbd_ort.decoding.option_row import Chosen
from dsbd_ort.decoding.option_table import OPTION_TABLE, read_options
from dsbd_ort.decoding.strategies import named_strategy
from dsbd_ort.model_defaults import DRAFTING, WARPING, ModelDefaults

Options = Mapping[str, Any] | DecodingConfig
"""The options that a caller gives, or a config, which is used unchanged."""


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


class ServerDefaults:
    """The options that a server was started with, for requests that leave them out.

    Attributes:
        strategy: of requests that name none: ``speculative``, whose single beam streams evenly, by
            default.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take the options; raise ConfigError if they are invalid or contradict each other."""
        self.options = {name: options[name] for name in OPTION_TABLE if name in options}
        self.strategy: str = options.get("strategy", "speculative")
        DecodingConfig(**(options if "strategy" in options else _named(self.strategy, options)))

    def strategy_of(self, given: Mapping[str, Any]) -> str:
        """Return the strategy of a request, which needs beams if it sets their number."""
        sets_beams = any(given.get(n, 1) != 1 for n in ("num_beams", "num_return_sequences"))
        return "dsbd" if sets_beams and not STRATEGIES[self.strategy].has_beams else self.strategy


def resolve(given: Mapping[str, Any], model: ModelDefaults) -> DecodingConfig:
    """Return the config, after ``with_server``; raise ConfigError for what the caller gives."""
    named = with_strategy(read_options(given), None, model)
    options = with_defaults(named, model.options_of(STRATEGIES[named["strategy"]], named))
    model.tell(options.keys() - named.keys())
    return DecodingConfig(**options)


def with_server(
    given: Mapping[str, Any],
    server: ServerDefaults,
    model: ModelDefaults,
    *,
    is_beam_search: bool = False,
) -> dict[str, Any]:
    """Return the options of a request with the defaults of the server; see ``with_strategy``."""
    named = with_strategy(given, server, model, is_beam_search=is_beam_search)
    return with_defaults(named, server.options)


def with_strategy(
    given: Mapping[str, Any],
    server: ServerDefaults | None,
    model: ModelDefaults,
    *,
    is_beam_search: bool = False,
) -> dict[str, Any]:
    """Return the options with a strategy, and with its number of beams if it implies one."""
    if given.get("strategy") is not None:
        return dict(given)
    names_strategy = server is not None and "strategy" in server.options
    samples = any(given.get(name) is not None for name in WARPING)
    if model.reads_source and not names_strategy:
        if not samples or given.get("temperature") == 0:
            return {**given, **_search_of_source_reader(given, model)}
    if is_beam_search:
        return _named("speculative-beam-search", given)
    if server is None:
        return _named("dsbd", given)
    return _named(server.strategy_of(given), given, server.options.get("temperature"))


def _named(
    default: str, given: Mapping[str, Any], temperature: float | None = None
) -> dict[str, Any]:
    """Return the options with a strategy, or with its counterpart at temperature 0."""
    strategy = named_strategy(default, is_cold=given.get("temperature", temperature) == 0)
    gains_beams = STRATEGIES[strategy].has_beams and not STRATEGIES[default].has_beams
    return {**({"num_beams": 1} if gains_beams else {}), **given, "strategy": strategy}


def _search_of_source_reader(given: Mapping[str, Any], model: ModelDefaults) -> dict[str, Any]:
    """Return the search that answers a source: as wide as the model's file says, else one beam."""
    num_beams = given.get("num_beams")
    if num_beams is None:
        num_beams = model.options.get("num_beams", 1)
    if model.has_draft or any(given.get(name) is not None for name in DRAFTING):
        return {"strategy": "speculative-beam-search", "num_beams": num_beams}
    if num_beams == 1:
        return {"strategy": "greedy"}
    return {"strategy": "beam-search", "num_beams": num_beams}


def with_defaults(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that name a strategy, with the defaults that mean something among them."""
    left_out = {
        name: value
        for name, value in defaults.items()
        if name not in options and _is_taken(name, options["strategy"])
    }
    if not left_out or _are_read(left_out, {**options, **left_out}):
        return {**options, **left_out}
    filled = dict(options)
    for name, value in left_out.items():
        if _are_read([name], everything := {**filled, name: value}):
            filled = everything
    return filled


def _is_taken(name: str, strategy: Any) -> bool:
    """Return whether a strategy takes an option, whatever the others are."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return False  # it will be refused
    chosen = Chosen(strategy=strategy)
    needs = OPTION_TABLE[name].needs
    return all(need.is_met(chosen) for need in needs if need.option == "strategy")


def _are_read(names: Iterable[str], options: dict[str, Any]) -> bool:
    """Return whether options mean something among the others, and contradict none."""
    try:
        config = DecodingConfig(**options)
    except ConfigError:
        return False
    return all(OPTION_TABLE[name].unmet(config) is None for name in names)
