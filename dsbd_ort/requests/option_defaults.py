"""From the options that a caller gives to the config of the request.

An option has the first of these values that exists: the caller's; the server's default; the
model's, from its generation_config.json; the usual one of chats; the default of the option table.
Only the caller's options are refused if they are invalid. A default that the strategy does not
read, or that contradicts the other options, is left out.

The options of generation_config.json are used, except the strategy (do_sample) and, for decoders,
the width (num_beams). The end-of-sequence tokens are in the manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingConfig
from dsbd_ort.decoding.option_row import NO_SEARCH, Chosen
from dsbd_ort.decoding.option_table import OPTION_TABLE, read_options
from dsbd_ort.decoding.option_values import Domain
from dsbd_ort.decoding.request import check_token_ids
from dsbd_ort.decoding.strategies import Strategy, named_strategy
from dsbd_runtime.bundle_files.bundle import GENERATION_CONFIG_FILE, Bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.head.head import parse_num_top_logits
from dsbd_runtime.typed_json import in_short, json_from_file

_log = logging.getLogger(__name__)
READ = tuple(name for name, row in OPTION_TABLE.items() if row.of_model is not None)
WARPING = tuple(name for name in READ if NO_SEARCH in OPTION_TABLE[name].needs)
"""Options of the file that searches do not read."""
OF_SEARCHES = tuple(name for name in READ if OPTION_TABLE[name].of_model == "search")
"""Options of the file that only searches with several beams read."""
_PREDICTIONS = ("predicted_text", "predicted_token_ids")
DRAFTING = ("drafter", "draft_policy", "draft_length", "draft_beams", *_PREDICTIONS)
_SAID_AS_THEY_ARE = ("temperature", "top_k", "top_p", "max_new_tokens")
"""Options of the file that are used even if they equal the table's default."""
_LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}
"""The older names of lengths. They include the prompt (for an encoder-decoder: one token)."""
CHAT_SAMPLING = {"temperature": 0.7, "top_p": 0.9}
LONGEST_CHAT_ANSWER = 2048  # tokens, for a model that never ends its answer
NOT_BUILT: dict[str, tuple[Any, ...]] = {  # name: the values that change nothing
    "forced_bos_token_id": (None,),  # this, the next and max_length: for decoders only
    "forced_eos_token_id": (None,),
    "max_length": (None, 0, 20),  # 20 was the default of transformers
    "constraints": (None, []),
    "diversity_penalty": (None, 0),
    "dola_layers": (None,),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "guidance_scale": (None, 1),
    "max_time": (None,),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, []),
    "token_healing": (None, False),
    "top_h": (None,),
    "watermarking_config": (None,),
}
"""Fields that change the output of transformers, but that no request here reads."""


@dataclass
class ModelDefaults:
    """Defaults of the requests to one bundle.

    options: the options in ``READ`` that the file gives, in plain form.
    min_length: least number of tokens of prompt and output together, for decoders; 0: no minimum.
    chat_options: defaults of chats, unless ``options`` has them; empty if requests are not chats.
    not_built: options of the file that dsbd-ort does not support.
    num_top_logits: K if the target returns only the K largest logits of a position and keeps no
        others; 0 if all logits can be read.
    """

    options: dict[str, Any] = field(default_factory=dict)
    chat_options: dict[str, Any] = field(default_factory=dict)
    not_built: dict[str, Any] = field(default_factory=dict)
    min_length: int = 0
    num_top_logits: int = 0
    reads_source: bool = False
    has_draft: bool = False
    _told: set[str] = field(default_factory=set)

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, reads_file: bool = True, of_chats: bool = False
    ) -> ModelDefaults:
        """Return the defaults of a bundle; raise BundleError if its file is invalid."""
        target = bundle.entry("target")
        reads_source = target.encoder is not None
        num_top_logits = 0 if target.head.keeps_full else parse_num_top_logits(target.logits)
        content: dict[str, Any] = {}
        file = bundle.path / GENERATION_CONFIG_FILE
        if reads_file and GENERATION_CONFIG_FILE in bundle.manifest.files:
            content = json_from_file(file)
            if not isinstance(content, dict):
                raise BundleError(f"{file} is {in_short(content)}, expected a JSON object")
        lengths = _older_lengths(content, file, reads_source)
        if reads_source:
            content |= {name: length - 1 for name, length in lengths.items() if length > 1}
        min_length = 0 if reads_source else lengths.get("min_new_tokens", 0)
        options = _options_of(content, file, reads_source)
        not_built = _not_built(content, reads_source)
        if num_top_logits:  # no processor can work on them
            not_built |= {
                name: options.pop(name)
                for name in [*options]
                if OPTION_TABLE[name].is_processor and OPTION_TABLE[name].of_model == "any"
            }
            if min_length:
                not_built["min_length"], min_length = min_length, 0
        chat_options: dict[str, Any] = {}
        if of_chats and not reads_source:  # a file with any sampling option decides all of them
            sampling = {} if any(name in options for name in WARPING) else CHAT_SAMPLING
            chat_options = {**sampling, "max_new_tokens": LONGEST_CHAT_ANSWER}
        has_draft = "draft" in bundle.roles
        return cls(
            options, chat_options, not_built, min_length, num_top_logits, reads_source, has_draft
        )

    @property
    def of_file(self) -> dict[str, Any]:
        """The options that the file gives, to be shown to people."""
        return {**self.options, **({"min_length": self.min_length} if self.min_length else {})}

    def log(self) -> None:
        """Log the defaults of requests, and the options of the file that have no effect."""
        if self.of_file:
            _log.info(
                "defaults of %s, for requests that leave them out: %s",
                GENERATION_CONFIG_FILE,
                listed(self.of_file),
            )
        if self.not_built:
            _log.warning(
                "%s has options that dsbd-ort does not support and that have no effect: %s",
                GENERATION_CONFIG_FILE,
                listed(self.not_built),
            )

    def options_of(self, strategy: Strategy, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of requests with a strategy; ``given`` are their options so far."""
        is_beam_search = strategy.rule == "search" and strategy.has_beams
        defaults = {
            name: value
            for name, value in {**self.chat_options, **self.options}.items()
            if is_beam_search or name not in OF_SEARCHES
        }
        if self.num_top_logits and "top_k" not in given and strategy.rule != "search":
            if not 1 <= defaults.get("top_k", 0) <= self.num_top_logits:
                self._tell_top_k(defaults.get("top_k", 0))
                defaults["top_k"] = self.num_top_logits
        return defaults

    def lengthened(
        self, config: DecodingConfig, given: Container[str], num_prompt_tokens: int
    ) -> DecodingConfig:
        """Return the config of a prompt with the model's ``min_length``, if it is read.

        given: names of the options that the caller gives; ``min_new_tokens`` has precedence.
        """
        least = min(self.min_length - num_prompt_tokens, config.max_new_tokens)
        if least <= config.min_new_tokens or "min_new_tokens" in given:
            return config
        return replace(config, min_new_tokens=least)

    def tell(self, used: Collection[str]) -> None:
        """Log once how a chat is sampled if neither the model nor the caller says it."""
        sampling = {n: v for n, v in self.chat_options.items() if n in used and n in WARPING}
        if sampling:
            self._warn_once(
                "sampling",
                f"no {GENERATION_CONFIG_FILE} says how to sample this chat: {listed(sampling)}; "
                "give them to choose, or --no-chat-defaults",
            )

    def _tell_top_k(self, of_file: int) -> None:
        said = f"{GENERATION_CONFIG_FILE} says {of_file}" if of_file else "nothing else is said"
        self._warn_once(
            "top_k",
            f"top_k is {self.num_top_logits}, as many logits as the engine returns of a position "
            f"({said}); give top_k to choose",
        )

    def _warn_once(self, subject: str, message: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            _log.warning("%s", message)


def _older_lengths(content: Mapping[str, Any], file: Path, reads_source: bool) -> dict[str, int]:
    """Return the values of ``_LENGTHS`` by their newer names, unless those are given too."""
    return {
        name: _read(older, OPTION_TABLE["min_new_tokens"].domain, content[older], file)
        for name, older in _LENGTHS.items()
        if content.get(name) is None and content.get(older) is not None
        if reads_source or older == "min_length"
    }


def _is_read(name: str, reads_source: bool) -> bool:
    of_source = OPTION_TABLE[name].of_model == "encoder-decoder" or name == "num_beams"
    return reads_source or not of_source


def _not_built(content: Mapping[str, Any], reads_source: bool) -> dict[str, Any]:
    """Return the fields of a file that change the output of transformers and have no effect."""
    unread = [name for name in NOT_BUILT if name not in READ or not _is_read(name, reads_source)]
    if reads_source or content.get("max_new_tokens") is not None:
        unread.remove("max_length")
    return {n: content[n] for n in unread if n in content and content[n] not in NOT_BUILT[n]}


def _options_of(content: Mapping[str, Any], file: Path, reads_source: bool) -> dict[str, Any]:
    options = {}
    for name in READ:
        row, value = OPTION_TABLE[name], content.get(name)
        if value is None or not _is_read(name, reads_source):
            continue
        value = _read(name, row.domain, value, file)
        usual = 1 if name == "num_beams" else row.default
        if name in _SAID_AS_THEY_ARE or value != usual:  # transformers also writes unused options
            options[name] = value
    return options


def _read(name: str, domain: Domain, value: object, file: Path) -> Any:
    try:
        return domain.read(name, value)
    except ConfigError as error:
        raise BundleError(
            f"{file}: {error}; export the bundle again from a checkpoint whose file is "
            "right, or open it without (--no-generation-config)"
        ) from error


def listed(values: Mapping[str, Any]) -> str:
    """Return options as "temperature 0.7, top_k 20"."""
    return ", ".join(f"{name} {in_short(value)}" for name, value in values.items())


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

    strategy: of requests that name no strategy. The default is ``speculative``, because its one
        beam streams evenly.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take the options; raise ConfigError if they are invalid or contradict each other."""
        self.options = {name: options[name] for name in OPTION_TABLE if name in options}
        self.strategy: str = options.get("strategy", "speculative")
        DecodingConfig(**(options if "strategy" in options else _named(self.strategy, options)))

    def strategy_of(self, given: Mapping[str, Any]) -> str:
        """Return the strategy of a request: one with beams if the request sets their number."""
        sets_beams = any(given.get(n, 1) != 1 for n in ("num_beams", "num_return_sequences"))
        return "dsbd" if sets_beams and not STRATEGIES[self.strategy].has_beams else self.strategy


def resolve(given: Mapping[str, Any], model: ModelDefaults) -> DecodingConfig:
    """Return the config of options (after ``with_server``); ConfigError: an option is invalid."""
    named = with_strategy(read_options(given), None, model)
    options = with_defaults(named, model.options_of(STRATEGIES[named["strategy"]], named))
    model.tell(options.keys() - named.keys())
    return DecodingConfig(**options)


def check_defaults(bundle: Bundle) -> None:
    """Raise BundleError, ConfigError or DecodingError if no request could use the defaults."""
    config = resolve({}, ModelDefaults.from_bundle(bundle))
    check_token_ids(config, bundle.manifest.target.vocab_size)


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
    """Return the search strategy for a source, with the file's number of beams, else one beam."""
    num_beams = given.get("num_beams")
    if num_beams is None:
        num_beams = model.options.get("num_beams", 1)
    if model.has_draft or any(given.get(name) is not None for name in DRAFTING):
        return {"strategy": "speculative-beam-search", "num_beams": num_beams}
    if num_beams == 1:
        return {"strategy": "greedy"}
    return {"strategy": "beam-search", "num_beams": num_beams}


def with_defaults(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that name a strategy, with the defaults that have an effect among them."""
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
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return False  # it will be refused
    chosen = Chosen(strategy=strategy)
    needs = OPTION_TABLE[name].needs
    return all(need.is_met(chosen) for need in needs if need.option == "strategy")


def _are_read(names: Iterable[str], options: dict[str, Any]) -> bool:
    """Return whether options have an effect among the others, and contradict none of them."""
    try:
        config = DecodingConfig(**options)
    except ConfigError:
        return False
    return all(OPTION_TABLE[name].unmet(config) is None for name in names)
