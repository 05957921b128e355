"""Command-line options as fields of a dataclass: groups, sections of the help, shared options.

A command is a function of one frozen dataclass. Each field carries its click option, so that an
option is spelled once; a field may also be a group of options that make one value:

    @dataclass(frozen=True, kw_only=True)
    class InspectArguments:
        bundle: Path = argument(type=PATH)
        verify: bool = flag(help="Check the hash of every file too.")

    @command(InspectArguments)
    def inspect(arguments: InspectArguments) -> None: ...

``section`` is the heading of an option in the command's help.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from dsbd_ort.commands.constraint_options import CONSTRAINT_OPTIONS, SECTION, constraint_given
from dsbd_ort.commands.one_line import OneLineCommand, SectionedOption
from dsbd_ort.commands.option_types import COUNT, COUNT_OR_NONE, PATH, OptionText
from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import SERVER_NGRAM_POOL
from dsbd_ort.sources import SRC_LANG, TGT_LANG
from dsbd_ort.version import __version__

Arguments = TypeVar("Arguments")
_KEY = "command line"  # of a field's metadata
_HELP_WIDTH = 100  # most columns of a command's help


class _Parameter(Protocol):
    """The command-line side of one field."""

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a command's function with the click parameters of the field ``name``."""

    def value(self, name: str, values: dict[str, Any]) -> Any:
        """Return the field's value from the values of all parameters."""


@dataclasses.dataclass(frozen=True)
class _Single:
    flags: tuple[str, ...] | None  # None: an argument, by its position
    settings: dict[str, Any]

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.flags is None:
            return click.argument(name, **self.settings)(function)
        flags = self.flags or ("--" + name.replace("_", "-"),)
        return click.option(*flags, name, cls=SectionedOption, **self.settings)(function)

    def value(self, name: str, values: dict[str, Any]) -> Any:
        return values[name]


@dataclasses.dataclass(frozen=True)
class _Group:
    make: Callable[..., Any]
    fixed: dict[str, Any]
    members: dict[str, _Parameter]

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for member in reversed(self.members):
            function = self.members[member].add(member, function)
        return function

    def value(self, name: str, values: dict[str, Any]) -> Any:
        given = {n: member.value(n, values) for n, member in self.members.items()}
        return self.make(**self.fixed, **given)


def option(*flags: str, **settings: Any) -> Any:
    """Return a field with an option, --its-name without ``flags``.

    Settings are those of click.option, and ``section``.
    """
    default = settings.get("default", False if settings.get("is_flag") else None)
    return dataclasses.field(default=default, metadata={_KEY: _Single(flags, settings)})


def flag(*flags: str, **settings: Any) -> Any:
    """Return a field that is False unless its flag is given."""
    return option(*flags, is_flag=True, **settings)


def no_flag(*flags: str, **settings: Any) -> Any:
    """Return a field that is True unless its flag, such as --no-prefix-cache, is given."""
    return option(*flags, is_flag=True, flag_value=False, default=True, **settings)


def argument(**settings: Any) -> Any:
    """Return a field with a positional argument; settings as of click.argument."""
    return dataclasses.field(metadata={_KEY: _Single(None, settings)})


def group(
    make: Callable[..., Any],
    fixed: dict[str, Any] | None = None,
    /,
    *,
    section: str | None = None,
    **members: Any,
) -> Any:
    """Return a field whose value is ``make(**fixed, **members)``; members are fields of the above.

    Where ``make`` is a dataclass, members take their defaults from its fields. ``section`` is that
    of the members that name none.
    """
    parameters: dict[str, _Parameter] = {n: field.metadata[_KEY] for n, field in members.items()}
    for name, parameter in parameters.items():
        if not isinstance(parameter, _Single) or parameter.flags is None:
            continue
        if section is not None:
            parameter.settings.setdefault("section", section)
        default = getattr(make, name, None)
        if default is not None:
            parameter.settings.setdefault("default", default)
    return dataclasses.field(metadata={_KEY: _Group(make, fixed or {}, parameters)})


def command(
    arguments: type[Arguments], **settings: Any
) -> Callable[[Callable[[Arguments], None]], click.Command]:
    """Make a function of ``arguments`` a command with the options that its fields carry."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(arguments)  # type: ignore[arg-type]

    def decorate(function: Callable[[Arguments], None]) -> click.Command:
        @functools.wraps(function)
        def callback(**values: Any) -> None:
            function(arguments(**{f.name: f.metadata[_KEY].value(f.name, values) for f in fields}))

        decorated: Callable[..., Any] = callback
        for field in reversed(fields):
            decorated = field.metadata[_KEY].add(field.name, decorated)
        decorated = click.version_option(__version__)(decorated)
        settings.setdefault("context_settings", {"max_content_width": _HELP_WIDTH})
        return click.command(cls=OneLineCommand, **settings)(decorated)

    return decorate


def given_flags(context: click.Context) -> dict[str, str]:
    """Return the parameters given on the command line: the long flag by the parameter's name."""
    return {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name
        and parameter.expose_value
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }


def pipeline_settings(*, of_server: bool = False, **fixed: Any) -> Any:
    """Return a field of PipelineSettings; ``fixed`` are those that have no option.

    of_server: no client's requests are drafted by the texts of others: how much is accepted, and
        how fast, would tell it what they say.
    """
    pool = "Tokens of earlier texts that drafter ngram looks through; 0: none."
    options = {
        "bundle": argument(type=PATH),
        "provider": option(show_default=True, help="Execution provider."),
        "draft_provider": option(help="Execution provider of the draft [that of the target]."),
        "num_threads": option(
            "--threads", type=COUNT, help="Threads of the target, and of a large draft."
        ),
        "spin_us": option(
            type=COUNT_OR_NONE,
            metavar="MICROSECONDS",
            help="How long an idle engine thread waits busily before it sleeps [20].",
        ),
        "engine_cache": option(
            type=click.Path(file_okay=False),
            help="Folder that keeps engines as they run, for openings that only map them.",
        ),
        "unfused_attention": flag(
            help="On cuda: attention without a copy of keys and values for every query head."
        ),
        "cuda_graphs": option(
            "--cuda-graphs/--no-cuda-graphs",
            default=None,
            help="On a GPU: capture each size of call once and replay it [on cuda].",
        ),
        "verify": flag(help="Check the hash of every file first."),
        "prefix_cache": no_flag(
            "--no-prefix-cache", help="Do not reuse cache rows of earlier prompts."
        ),
        "generation_config": no_flag(
            "--no-generation-config",
            help="Leave the bundle's generation_config.json out: it has the model's own defaults.",
        ),
        "ngram_pool": option(
            type=COUNT_OR_NONE,
            show_default=True,
            help=f"For each API key. {pool}" if of_server else pool,
            **({"default": SERVER_NGRAM_POOL} if of_server else {}),
        ),
    }
    members = {name: field for name, field in options.items() if name not in fixed}
    return group(PipelineSettings, fixed, section="Engines", **members)


OPTIONS = {
    "strategy": f"one of {', '.join(STRATEGIES)}",
    "num_beams": "W, beams of the output [4; 1 for single-beam strategies]",
    "coupling": "gumbel or rejection [gumbel for sampling strategies]",
    "width_policy": "fixed; of dsbd also threshold [fixed, unless the next two are given]",
    "min_beams": "fewest beams that threshold keeps [half of num_beams]",
    "accept_threshold": "probability of acceptance that threshold requires",
    "drafter": "model, ngram (no model: what followed the last tokens before), model+ngram or none "
    "[model; ngram without one]",
    "draft_policy": "fixed, or throughput: as much as is expected to pay "
    "[throughput where it never shows in the output, unless the next two are given]",
    "draft_length": "layers of a drafted forest [4; throughput: at most 8]",
    "draft_beams": "candidates of every drafted layer, or of each "
    "[num_beams; throughput: at most 4 times as many]",
    "memory": "forest; of dsbd also single",
    "replacement": "draw beams with replacement",
    "temperature": "of both models",
    "top_k": "draw from the k most probable tokens; 0: from all",
    "top_p": "draw from the smallest set of this probability; 1: from all",
    "min_p": "draw from tokens of at least this share of the best one's probability",
    "typical_p": "draw from the tokens nearest to the entropy, of this probability; 1: from all",
    "repetition_penalty": "above 1: fewer tokens of prompt and output",
    "presence_penalty": "subtracted from the logits of tokens in the output",
    "frequency_penalty": "the same, for each time",
    "no_repeat_ngram_size": "no n-gram of this size twice; 0: off",
    "encoder_no_repeat_ngram_size": "no n-gram of this size of the source or prompt; 0: off",
    "bad_words_ids": "token sequences that never occur, as JSON: [[5], [7, 8]]",
    "logit_bias": 'added to the logits of tokens, as JSON: {"5": -1.5}',
    "suppress_tokens": "token ids that never occur",
    "begin_suppress_tokens": "token ids that are not the first",
    "no_timestamps_token_id": "of a speech model, the token before its times: they follow "
    "Whisper's rules",
    "max_initial_timestamp_index": "the last of these times that may be the first token",
    "last_timestamp_token_id": "the last of these times; default: the last token",
    "min_new_tokens": "none of so many new tokens ends the output",
    "forced_bos_token_id": "the only token behind a prompt of one token",
    "forced_eos_token_id": "the last of max_new_tokens",
    "max_new_tokens": "longest continuation; of a --chat up to 2048",
    "seed": "same seed, same output",
    "num_return_sequences": "how many of the final beams to print, best first",
    "length_penalty": "rank by logprob / tokens ** length_penalty",
    "early_stopping": "of beams, when to end before all have: true, false or never",
    "joint_threshold": "of mjsd: likelihood ratio to exceed [0.1]",
    "joint_tokens": "of mjgd: tokens decided jointly [4]",
    "joint_beams": "of mjgd: beams that search them [4]",
    "stop_strings": "end at this text; may be repeated",
    "eos_token_id": "token ids that end a sequence [the model's own]",
    "top_logprobs": "most probable tokens to return with every new one, in the JSON",
    "prompt_logprobs": "return the log-probabilities of the prompt's tokens, in the JSON",
    "skip_special_tokens": "leave special tokens out of the text",
}
"""Help of the fields of DecodingConfig but ``constraint``; their own defaults are added."""


_SECTIONS = {
    "Strategy and beams": "strategy num_beams num_return_sequences length_penalty early_stopping",
    "Sampling": "temperature top_k top_p min_p typical_p seed",
    "Length and end": (
        "max_new_tokens min_new_tokens stop_strings eos_token_id forced_eos_token_id "
        "forced_bos_token_id"
    ),
    "Penalties and bans": (
        "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size bad_words_ids logit_bias suppress_tokens "
        "begin_suppress_tokens no_timestamps_token_id max_initial_timestamp_index "
        "last_timestamp_token_id"
    ),
    SECTION: "constraint",
    "Text and log-probabilities": "top_logprobs prompt_logprobs skip_special_tokens",
    "Drafts and width (rarely needed)": (
        "drafter draft_policy draft_length draft_beams width_policy min_beams accept_threshold "
        "coupling memory replacement"
    ),
    "Joint decoding (mjsd, mjgd)": "joint_threshold joint_tokens joint_beams",
}
_TRANSLATION = "Translation (encoder-decoders)"
_LANGUAGES = {
    SRC_LANG: "language of the prompt, as the model calls it: eng_Latn, en_XX [its tokenizer's]",
    TGT_LANG: "language of the answer [what generation_config.json says]",
}
_OTHER_SECTION = "Other decoding options"


def _options_by_section() -> dict[str, str]:
    """Return the section of every decoding option, in the order of the help."""
    known = {name: section for section, names in _SECTIONS.items() for name in names.split()}
    others = [name for name in OPTIONS if name not in known]
    return {**known, **dict.fromkeys(others, _OTHER_SECTION)}


def decoding_options(*, without: Collection[str] = (), names_languages: bool = False) -> Any:
    """Return a field with an option per field of DecodingConfig: a dict of those given.

    ``constraint`` has one for each kind.

    Args:
        without: fields that get no option.
        names_languages: whether there are options for those of source and target, too.
    """
    default_by_name = {field.name: field.default for field in dataclasses.fields(DecodingConfig)}
    options: dict[str, Any] = {}
    for name, section in _options_by_section().items():
        if section == SECTION and name not in without:
            options |= {
                kind: option(flags, **settings, section=section)
                for kind, (flags, settings) in CONSTRAINT_OPTIONS.items()
            }
        if section == SECTION or name in without:
            continue
        default = default_by_name[name]
        settings = {
            "type": OptionText(name),
            "help": OPTIONS[name] + ("" if default in (None, ()) else f" [{default}]"),
            "section": section,
        }
        if name == "stop_strings":
            options[name] = option("--stop", multiple=True, **settings)
        else:
            options[name] = option(**settings)
    for name, help_text in _LANGUAGES.items() if names_languages else ():
        options[name] = option(help=help_text, metavar="NAME", section=_TRANSLATION)
    return group(_given, **options)


def _given(**values: Any) -> dict[str, Any]:
    kinds = {name: values.pop(name) for name in CONSTRAINT_OPTIONS if name in values}
    values["constraint"] = constraint_given(kinds)
    return {name: value for name, value in values.items() if value not in (None, ())}
