"""The table of options: one row for each, with all that is known of it.

Options as a caller gives them are typed in ``DecodingOptions``, resolved ones in ``DecodingConfig``
(``config.py``).
An option that means nothing to the strategy or to another option is refused, unless its value is
neutral (it changes nothing) or redundant (it happens anyway).
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.option_row import (
    BY_NGRAMS,
    DRAFTED_BY_MODEL,
    DRAFTED_LAYERS,
    DRAFTING,
    DSBD,
    DYNAMIC_WIDTH,
    EVERY_BEAM,
    FREE_OF_THE_DRAFT,
    HAS_BEAMS,
    HAS_DRAFT,
    HAS_DRAFT_TREE,
    HAS_TIMES,
    MJGD,
    MJSD,
    MOST_NODES,
    NO_SEARCH,
    SAMPLES,
    SEVERAL_DRAWS,
    USUAL_THRESHOLD,
    Chosen,
    OptionRow,
    fixed_width,
    half_width,
    is_cold,
    one_path,
    undrafted,
    usual_draft_beams,
    usual_draft_length,
    usual_draft_policy,
    usual_drafter,
    usual_strategy,
    usual_width_policy,
)
from dsbd_ort.decoding.option_values import (
    Biases,
    Number,
    Objects,
    OneOf,
    Text,
    Texts,
    TokenSequences,
    Whole,
    WholeOrName,
    Wholes,
    did_you_mean,
    shown,
)
from dsbd_ort.decoding.strategies import STRATEGIES

MOST_BEAMS = MOST_LAYERS = 1024
USUAL_BEAMS = 4
MOST_TOP_LOGPROBS = 20  # as OpenAI allows
_MOST = 2**31 - 1
_LARGEST = sys.float_info.max
_TOKENS = Wholes(Whole(0, _MOST), 65_536, is_ordered=False, noun="token id", is_always_list=True)
_TOKEN = Whole(0, _MOST)
_FLAG = OneOf((False, True))

_Processor = functools.partial(OptionRow, is_processor=True)
_Warping = functools.partial(OptionRow, needs=(NO_SEARCH,), of_model="any")
_Predicted = functools.partial(
    OptionRow, needs=(FREE_OF_THE_DRAFT, BY_NGRAMS), is_set_by_server=False
)


OPTIONS_BY_SECTION: dict[str, dict[str, OptionRow]] = {
    "Strategy and beams": {
        "strategy": OptionRow(
            OneOf(tuple(STRATEGIES), is_quoted=False),
            usual_strategy,
            f"One of {', '.join(STRATEGIES)} [dsbd, of dsbd-serve speculative; at temperature 0 "
            "the counterpart that draws nothing].",
            is_usual=True,
        ),
        "num_beams": OptionRow(
            Whole(1, MOST_BEAMS),
            lambda _: USUAL_BEAMS,
            "W, beams of the output [4; 1 for strategies with a single beam].",
            needs=(HAS_BEAMS,),
            neutral=(1,),
            of_model="search",
            is_usual=True,
        ),
        "num_return_sequences": OptionRow(
            Whole(1, MOST_BEAMS),
            1,
            "How many of the final beams to return, best first.",
            needs=(HAS_BEAMS,),
            is_set_by_server=False,
        ),
        "length_penalty": OptionRow(
            Number(-30.0, 30.0),  # num_new_tokens to the power of it stays finite
            1.0,
            "Sequences are ranked by logprob / num_new_tokens ** length_penalty.",
            of_model="search",
        ),
        "early_stopping": OptionRow(
            OneOf((False, True, "never")),
            False,
            "When a request may end before all its beams have. true: when enough sequences have "
            "ended; false: if no live beam scores more than these now; never: if none can score "
            "more within max_new_tokens.",
            needs=(HAS_BEAMS, EVERY_BEAM),
            of_model="search",
        ),
    },
    "Drafts and width": {
        "coupling": OptionRow(
            OneOf(("gumbel", "rejection")),
            lambda _: "gumbel",
            "How draft and target draw: gumbel (the output does not depend on the draft) or "
            "rejection (the paper's) [gumbel for strategies that sample].",
            needs=(SAMPLES,),
            neutral=(None,),
        ),
        "width_policy": OptionRow(
            OneOf(("fixed", "threshold")),
            usual_width_policy,
            "fixed: every layer has all beams, as in beam sampling. threshold (dsbd only): as "
            "many beams as are likely to be accepted [fixed, unless one of the next two is given].",
            needs=(DSBD,),
            neutral=("fixed",),
        ),
        "drafter": OptionRow(
            OneOf(("model", "ngram", "model+ngram", "none")),
            usual_drafter,
            "What drafts: model; ngram (no model: what followed the last tokens earlier in this "
            "text and in others); model+ngram (n-grams only for long repetitions); none "
            "[model, with a predicted text model+ngram; ngram if the bundle has no draft].",
            needs=(FREE_OF_THE_DRAFT,),
            neutral=undrafted,
        ),
        "predicted_text": _Predicted(
            Text(),
            None,
            "Text that the output is expected to repeat except for edits, as the old version of a "
            "file: it drafts; the output stays the same, unless the strategy's depends on drafts. "
            "What exceeds the context is not used.",
        ),
        "predicted_token_ids": _Predicted(
            Wholes(
                _TOKEN, 2**17, is_ordered=True, noun="token id", is_always_list=True, is_cut=True
            ),
            (),
            "The same as token ids.",
        ),
        "draft_policy": OptionRow(
            OneOf(("fixed", "throughput")),
            usual_draft_policy,
            "fixed: draft_length layers of draft_beams candidates. throughput: as many as are "
            "expected to pay, at most those [throughput if it cannot change the output and neither "
            "number is given].",
            needs=(FREE_OF_THE_DRAFT, DRAFTING),
            neutral=("fixed",),
        ),
        "draft_length": OptionRow(
            Whole(0, MOST_LAYERS),
            usual_draft_length,
            "Layers of a drafted forest [4; throughput: at most 8, 16 with a predicted text].",
            needs=(HAS_DRAFT, DRAFTING),
            neutral=(0,),
        ),
        "draft_beams": OptionRow(
            Wholes(Whole(1, MOST_NODES), MOST_LAYERS, is_ordered=True),
            usual_draft_beams,
            "Candidates of every drafted layer, or of each: 4,4,2 "
            "[num_beams, or 4 for one beam; throughput: at most 4 times as many].",
            needs=(HAS_DRAFT, DRAFTED_LAYERS, HAS_DRAFT_TREE),
            neutral=one_path,
        ),
        "draft_context": OptionRow(
            WholeOrName(Whole(1, _MOST), ("all", "auto")),
            "auto",
            "The draft model reads between this many tokens at the end of the prompt and 1.5 times "
            "as many, or all. auto: the number expected to save most time, all if the output "
            "depends on the draft.",
            needs=(HAS_DRAFT, DRAFTED_BY_MODEL),
            neutral=("all", "auto"),
        ),
        "min_beams": OptionRow(
            Whole(1, MOST_BEAMS),
            half_width,
            "Fewest beams that threshold keeps [half of num_beams].",
            needs=DYNAMIC_WIDTH,
            neutral=fixed_width,
        ),
        "accept_threshold": OptionRow(
            Number(0.0, 1.0),
            USUAL_THRESHOLD,
            "Probability with which threshold requires a layer to be accepted.",
            needs=DYNAMIC_WIDTH,
        ),
        "memory": OptionRow(
            OneOf(("forest", "single")),
            "forest",
            "forest: continue with all beams. single (dsbd only): after every iteration with the "
            "one of highest log-probability per token.",
            needs=(DSBD,),
        ),
        "replacement": OptionRow(
            _FLAG,
            False,
            "Draw beams with replacement (the paper's theorem) instead of distinct ones.",
            needs=(SAMPLES, SEVERAL_DRAWS),
        ),
    },
    "Sampling": {
        "temperature": _Warping(
            Number(0.0, _LARGEST, least_positive=1e-6),  # a logit divided by it stays finite
            1.0,
            "Sampling temperature, of both models; 0 draws nothing.",
            neutral=(1.0, 0.0),
            is_usual=True,
        ),
        "top_k": _Warping(
            Whole(0, _MOST, off=-1),
            0,
            "Draw from the k most probable tokens; 0 or -1: from all.",
            is_redundant=is_cold,
            is_usual=True,
        ),
        "top_p": _Warping(
            Number(0.0, 1.0, is_open=True),
            1.0,
            "Draw from the smallest set of tokens of this probability; 1: from all.",
            is_redundant=is_cold,
            is_usual=True,
        ),
        "min_p": _Warping(
            Number(0.0, 1.0),
            0.0,
            "Draw from tokens of at least this share of the best token's probability.",
            is_redundant=is_cold,
        ),
        "typical_p": _Warping(
            Number(0.0, 1.0, is_open=True),
            1.0,
            "Draw from the fewest tokens nearest to the entropy that have this probability "
            "(locally typical sampling); 1: from all.",
        ),
        "seed": OptionRow(
            Whole(0, 2**128 - 1),
            None,
            "Same seed, same output [random; it is reported].",
            is_usual=True,
        ),
    },
    "Length and end": {
        "max_new_tokens": OptionRow(
            Whole(1, _MOST),
            64,
            "Longest continuation, the end-of-sequence token included; with --chat up to 2048.",
            of_model="any",
            is_usual=True,
            is_set_by_server=False,
            http=("max_tokens", "max_completion_tokens"),
        ),
        "min_new_tokens": _Processor(
            Whole(0, _MOST),
            0,
            "The output has at least this many tokens; stop strings are looked for after them.",
            of_model="any",
            http=("min_tokens",),
        ),
        "stop_strings": OptionRow(
            Texts(256, 4096),
            lambda _: (),
            "End at this text, which is cut off. May be repeated.",
            is_usual=True,
            http=("stop",),
        ),
        "eos_token_id": OptionRow(
            Wholes(Whole(0, _MOST), 1024, is_ordered=False, noun="token id", is_always_list=True),
            None,
            "Token ids that end a sequence [the model's own].",
        ),
        "forced_eos_token_id": _Processor(
            _TOKEN,
            None,
            "The token that ends an output of max_new_tokens.",
            of_model="encoder-decoder",
        ),
        "forced_bos_token_id": _Processor(
            _TOKEN,
            None,
            "The first new token if the prompt is one token, as of an encoder-decoder.",
            of_model="encoder-decoder",
        ),
    },
    "Penalties and bans": {
        "repetition_penalty": _Processor(
            Number(1e-6, 1e6),
            1.0,
            "Divides positive logits of tokens that occur in prompt or output, multiplies "
            "negative ones; above 1: fewer of them.",
            of_model="any",
        ),
        "presence_penalty": _Processor(
            Number(-1e6, 1e6), 0.0, "Subtracted from the logits of tokens that occur in the output."
        ),
        "frequency_penalty": _Processor(
            Number(-1e6, 1e6), 0.0, "The same, once for each time that the token occurs."
        ),
        "no_repeat_ngram_size": _Processor(
            Whole(0, 1024),
            0,
            "No n-gram of this size occurs twice in prompt and output; 0: off.",
            of_model="any",
        ),
        "encoder_no_repeat_ngram_size": _Processor(
            Whole(0, 1024),
            0,
            "No n-gram of this size of the source, or of the prompt if there is no source, occurs "
            "in the output; 0: off.",
            of_model="any",
        ),
        "bad_words_ids": _Processor(
            TokenSequences(4096, 256),
            (),
            "Token sequences that never occur in the output, as JSON: [[5], [7, 8]].",
            of_model="any",
        ),
        "logit_bias": _Processor(
            Biases(4096, Number(-1e9, 1e9)),
            (),
            'Added to the logits of tokens, as JSON: {"5": -1.5}.',
        ),
        "suppress_tokens": _Processor(
            _TOKENS, (), "Token ids that never occur in the output.", of_model="any"
        ),
        "begin_suppress_tokens": _Processor(
            _TOKENS, (), "Token ids that are not the first of the output.", of_model="any"
        ),
        "no_timestamps_token_id": _Processor(
            _TOKEN,
            None,
            "Of a speech model, the token before its times: the output has times by Whisper's "
            "rules.",
        ),
        "max_initial_timestamp_index": OptionRow(
            _TOKEN,
            None,
            "The last of these times that the output may begin with [any].",
            needs=(HAS_TIMES,),
        ),
        "last_timestamp_token_id": OptionRow(
            _TOKEN, None, "The last of these times [the last token].", needs=(HAS_TIMES,)
        ),
        "logits_processors": _Processor(
            Objects((("__call__",),), "a list of functions of a path and its scores", is_list=True),
            (),
            "Functions (path, scores) -> scores of the caller, applied after those above. path: "
            "prompt and new tokens, (num_tokens,) int64; scores: (vocab_size,) float64.",
            is_set_by_server=False,
            http=None,
        ),
        "scorers": _Processor(
            Objects(
                (("start", "advance", "scores"), ("bind",)),
                "a list of scorers, such as dsbd_ort.scorers.LanguageModel",
                is_list=True,
            ),
            (),
            "Scorers, applied last: each adds a number to the score of every next token.",
            is_set_by_server=False,
            http=None,
        ),
    },
    "Constraint": {
        "constraint": _Processor(
            Objects(
                (("start", "advance", "allowed", "accepts", "has_ended"), ("bind",)),
                "a constraint, such as dsbd_ort.JsonSchema or {'regex': '[0-9]+'}",
            ),
            None,
            "Which texts may follow.",
            is_set_by_server=False,
            http=None,
        )
    },
    "Text and log-probabilities": {
        "top_logprobs": OptionRow(
            Whole(0, MOST_TOP_LOGPROBS),
            0,
            "Most probable tokens to return with every new one, in the JSON.",
            is_set_by_server=False,
            http=None,
        ),
        "prompt_logprobs": OptionRow(
            _FLAG,
            False,
            "Return the log-probabilities of the prompt's tokens, in the JSON.",
            is_set_by_server=False,
            http=None,
        ),
        "skip_special_tokens": OptionRow(_FLAG, True, "Leave special tokens out of the text."),
    },
    "Joint decoding (mjsd, mjgd)": {
        "joint_threshold": OptionRow(
            Number(0.0, _LARGEST, is_open=True),
            lambda _: 0.1,
            "Of mjsd: joint likelihood ratio that accepted tokens must exceed [0.1].",
            needs=(MJSD,),
        ),
        "joint_tokens": OptionRow(
            Whole(1, _MOST), lambda _: 4, "Of mjgd: tokens decided jointly [4].", needs=(MJGD,)
        ),
        "joint_beams": OptionRow(
            Whole(1, MOST_BEAMS), lambda _: 4, "Of mjgd: beams that search them [4].", needs=(MJGD,)
        ),
    },
}
"""Rows by the heading of their help; resolved in this order: what decides comes first."""

OPTION_TABLE = {name: row for rows in OPTIONS_BY_SECTION.values() for name, row in rows.items()}
PROCESSORS = tuple(name for name, row in OPTION_TABLE.items() if row.is_processor)
IN_PYTHON_ALONE = ("logits_processors", "scorers")
"""Options whose values no text or JSON can give."""
_DEFAULTS = {
    name: None if callable(row.default) else row.default for name, row in OPTION_TABLE.items()
}
_DEPENDENT = tuple(n for n, row in OPTION_TABLE.items() if row.needs or callable(row.default))


def read_option(name: str, value: object) -> Any:
    """Return a value in its plain form, or None for a default; ConfigError: it is no value."""
    row = OPTION_TABLE[name]
    if value is row.default or (value is None and row.takes_none):
        return value
    return row.domain.read(name, value)


def read_options(given: Mapping[str, object]) -> dict[str, Any]:
    """Return options in their plain form; ConfigError: no such option, or no such value."""
    if unknown := sorted(set(given) - OPTION_TABLE.keys(), key=str):
        close = did_you_mean(unknown[0], OPTION_TABLE)
        expected = close or "; expected a field of DecodingConfig (docs/run.md lists them)"
        raise ConfigError(f"unknown option {shown(unknown[0])}{expected}")
    return {name: read_option(name, value) for name, value in given.items()}


def resolved_options(
    given: Mapping[str, object], has_draft: bool | None = None, costs_are_known: bool | None = None
) -> dict[str, Any]:
    """Return the values of all options.

    has_draft, costs_are_known: see ``Chosen``; None leaves open what depends on it.

    Raises:
        ConfigError: a value is invalid, or an option means nothing and its value is not neutral.
    """
    read = read_options(given)
    chosen = Chosen(**{**_DEFAULTS, **read})
    chosen.is_cold = chosen.temperature == 0.0
    chosen.has_draft, chosen.costs_are_known = has_draft, costs_are_known
    for name in _DEPENDENT:
        setattr(chosen, name, _resolved(name, getattr(chosen, name), chosen))
    values = vars(chosen)
    if isinstance(chosen.draft_beams, int):
        values["draft_beams"] = (chosen.draft_beams,) * (chosen.draft_length or 0)
    return {name: values[name] for name in OPTION_TABLE}


def _resolved(name: str, value: Any, options: Chosen) -> Any:
    row = OPTION_TABLE[name]
    unmet = row.unmet(options)
    if unmet is None:
        return row.default_of(options) if value is None else value
    neutral = row.neutral_of(options)
    if value is None or value in neutral or row.is_redundant(options):
        return neutral[0]
    decided = f"to strategy {options.strategy}"
    if unmet.option != "strategy":
        decided = f"with {unmet.option} {getattr(options, unmet.option)!r}"
    raise ConfigError(
        f"{name} is {shown(value)}, which means nothing {decided}; leave it out, or set "
        f"{unmet.option} to {unmet.remedy}"
    )
