"""A model's own defaults: what its generation_config.json says where a request says nothing.

Of the file the sampling options count; the strategy and its widths are the caller's, and the
end-of-sequence tokens stand in the manifest. A value that a strategy does not read is left out
there: only what the caller sends is refused. Engines with a top-k head have a default too: K. So
have chats, for which the table's are poor: where the file says nothing of sampling the usual one,
and an answer that is not cut short.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingConfig
from dsbd_ort.decoding.option_table import read_option
from dsbd_ort.decoding.strategies import Strategy, unnamed_strategy
from dsbd_runtime.bundle_files.bundle import GENERATION_CONFIG_FILE, Bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.head import parse_num_top_logits
from dsbd_runtime.typed_json import in_short, json_from_file

_log = logging.getLogger(__name__)
WARPING = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # which searches do not read
PROCESSING = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_new_tokens",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
)
OF_SEARCHES = ("num_beams", "length_penalty", "early_stopping")
"""Of the file of an encoder-decoder, whose users run the search that it says."""
DRAFTING = ("drafter", "draft_policy", "draft_length", "draft_beams")
OF_TARGETS = ("forced_bos_token_id", "forced_eos_token_id")
"""Of the file of an encoder-decoder too: of a target that begins with one token."""
_LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}
"""The older names of lengths, which count the token that a target begins with."""
READ = (*WARPING, *PROCESSING, "max_new_tokens")
CHAT_SAMPLING = {"temperature": 0.7, "top_p": 0.9}
LONGEST_CHAT_ANSWER = 2048  # tokens, where a model goes on for ever
_NOT_BUILT: dict[str, tuple[Any, ...]] = {  # name: the values that ask for nothing
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, []),
}


@dataclass
class ModelDefaults:
    """Defaults of the requests to one bundle.

    Attributes:
        options: of ``READ``, those that the file gives, in plain form.
        chat_options: of chats, behind those; empty where requests are none.
        not_built: its options that dsbd-ort does not support.
        num_top_logits: K of a target that returns so many logits of a position and keeps no
            others; 0 where any can be read.
        reads_source: whether the target is an encoder-decoder: ``OF_SEARCHES`` and ``OF_TARGETS``
            count too, and requests that ask for no sampling search.
        has_draft: whether the bundle has a draft model.
    """

    options: dict[str, Any] = field(default_factory=dict)
    chat_options: dict[str, Any] = field(default_factory=dict)
    not_built: dict[str, Any] = field(default_factory=dict)
    num_top_logits: int = 0
    reads_source: bool = False
    has_draft: bool = False
    _has_told_top_k: bool = False
    _has_told_sampling: bool = False

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, reads_file: bool = True, of_chats: bool = False
    ) -> ModelDefaults:
        """Return the defaults of an opened bundle.

        Args:
            bundle: is not kept.
            reads_file: whether its generation_config.json counts.
            of_chats: whether its requests are chats.

        Raises:
            BundleError: the file is no JSON object, or gives an option no value that it takes.
        """
        target = bundle.entry("target")
        keeps_all = target.head.keeps_full
        num_top_logits = 0 if keeps_all else parse_num_top_logits(target.logits)
        file = bundle.path / GENERATION_CONFIG_FILE
        content: Any = {}
        if reads_file and GENERATION_CONFIG_FILE in bundle.manifest.files:
            content = json_from_file(file)
        if not isinstance(content, dict):
            raise BundleError(f"{file} is {in_short(content)}, expected a JSON object")
        reads_source = target.encoder is not None
        if reads_source:
            content = _of_source_reader(content)
        options = {}
        for name in (*READ, *((*OF_SEARCHES, *OF_TARGETS) if reads_source else ())):
            if content.get(name) is not None:
                try:
                    options[name] = read_option(name, content[name])
                except ConfigError as error:
                    raise BundleError(
                        f"{file}: {error}; export the bundle again from a checkpoint whose file is "
                        "right, or open it without (--no-generation-config)"
                    ) from error
        usual = {**vars(DecodingConfig()), "num_beams": 1}
        for name in (*PROCESSING, *OF_SEARCHES, *OF_TARGETS, "min_p", "typical_p"):
            if name in options and options[name] == usual[name]:  # as transformers writes them: off
                del options[name]
        asked = {name: content[name] for name in _NOT_BUILT if name in content}
        not_built = {n: value for n, value in asked.items() if value not in _NOT_BUILT[n]}
        if num_top_logits:
            not_built |= {name: options.pop(name) for name in PROCESSING if name in options}
        chat_options = _options_of_chats(options) if of_chats else {}
        return cls(
            options,
            chat_options,
            not_built,
            num_top_logits,
            reads_source,
            "draft" in bundle.roles,
        )

    def log(self) -> None:
        """Log what requests will get, and which options of the file have no effect."""
        if self.options:
            _log.info(
                "defaults of %s, where a request and its strategy leave room: %s",
                GENERATION_CONFIG_FILE,
                listed(self.options),
            )
        if self.not_built:
            _log.warning(
                "%s has options that dsbd-ort does not support and that have no effect: %s",
                GENERATION_CONFIG_FILE,
                listed(self.not_built),
            )

    def filled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request with the defaults that its strategy reads."""
        if self.reads_source:
            options = self.searched(options)
        strategy = options.get("strategy")
        if strategy is None:
            strategy = unnamed_strategy("dsbd", options)["strategy"]
        row = STRATEGIES.get(strategy) if isinstance(strategy, str) else None
        if row is None:
            return dict(options)  # DecodingConfig refuses it, with the strategies there are
        defaults = {**self.chat_options, **self.options}
        left_out = {
            name: value
            for name, value in defaults.items()
            if name not in options and _is_read(name, value, row)
        }
        if unread := sorted(set(defaults) - set(options) - set(left_out)):
            _log.debug("strategy %s does not read %s", strategy, ", ".join(unread))
        self._tell_sampling({n: left_out[n] for n in self.chat_options if n in left_out})
        if self.num_top_logits and "top_k" not in options and row.rule != "search":
            left_out["top_k"] = self._top_k(left_out.get("top_k", 0))
        return {**options, **left_out}

    def searched(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a request to an encoder-decoder with a search, if it is for one.

        That is one without a strategy and without options of sampling. It has as many beams as the
        file says, one where it says none, and is drafted where there is a draft or it says how.
        """
        samples = any(options.get(name) is not None for name in WARPING)
        if options.get("strategy") is not None or (samples and options.get("temperature") != 0):
            return options
        num_beams = options.get("num_beams")
        if num_beams is None:
            num_beams = self.options.get("num_beams", 1)
        if self.has_draft or any(options.get(name) is not None for name in DRAFTING):
            return {**options, "strategy": "speculative-beam-search", "num_beams": num_beams}
        if num_beams == 1:
            return {**options, "strategy": "greedy"}
        return {**options, "strategy": "beam-search", "num_beams": num_beams}

    def _tell_sampling(self, of_chats: Mapping[str, Any]) -> None:
        """Say once how a chat is sampled whose model and caller say nothing of it."""
        sampling = {name: value for name, value in of_chats.items() if name in WARPING}
        if sampling and not self._has_told_sampling:
            self._has_told_sampling = True
            _log.warning(
                "no %s says how to sample this chat: %s; give them to choose, or "
                "--no-chat-defaults",
                GENERATION_CONFIG_FILE,
                listed(sampling),
            )

    def _top_k(self, default: int) -> int:
        """Return the default for engines with a top-k head; say once where it is K."""
        if 1 <= default <= self.num_top_logits:
            return default
        if not self._has_told_top_k:
            self._has_told_top_k = True
            said = f"{GENERATION_CONFIG_FILE} says {default}" if default else "nothing else is said"
            _log.warning(
                "top_k is %d, as many logits as the engine returns of a position (%s); give top_k "
                "to choose",
                self.num_top_logits,
                said,
            )
        return self.num_top_logits


def _of_source_reader(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file with lengths that count new tokens alone."""
    found = dict(content)
    for name, older in _LENGTHS.items():
        length = content.get(older)
        if content.get(name) is None and type(length) is int and length > 1:
            found[name] = length - 1
    return found


def _options_of_chats(of_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of chats whose model has these; one that says how to sample says all."""
    sampling = {} if any(name in of_model for name in WARPING) else CHAT_SAMPLING
    return {**sampling, "max_new_tokens": LONGEST_CHAT_ANSWER}


def _is_read(name: str, value: Any, row: Strategy) -> bool:
    """Return whether a strategy reads an option of ``READ``, and can have this value."""
    if name in OF_SEARCHES and (row.rule != "search" or not row.has_beams):
        return False
    if name == "temperature" and value == 0.0 and row.rule == "sample":
        return False
    return name not in WARPING or row.rule != "search"


def listed(values: Mapping[str, Any]) -> str:
    """Return options as "temperature 0.7, top_k 20"."""
    return ", ".join(f"{name} {in_short(value)}" for name, value in values.items())
