"""The table of options: one row for each, with all that is known of it.

The typed names are in ``config.py``: ``DecodingOptions`` (given) and ``DecodingConfig`` (resolved).
An option that means nothing to the strategy or to another option is refused, unless its value is
neutral (it changes nothing) or redundant (it says what happens anyway).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.option_row import (
    BEAMS,
    CONSTRAINT,
    DRAFTED_LAYERS,
    DRAFTING,
    DRAFTS,
    DSBD,
    DYNAMIC_WIDTH,
    END,
    EVERY_BEAM,
    FREE_OF_THE_DRAFT,
    HAS_BEAMS,
    HAS_DRAFT,
    HAS_DRAFT_TREE,
    HAS_TIMES,
    JOINT,
    MJGD,
    MJSD,
    MOST_NODES,
    NO_SEARCH,
    OUTPUT,
    PENALTIES,
    SAMPLES,
    SAMPLING,
    SEVERAL_DRAWS,
    USUAL_THRESHOLD,
    Chosen,
    OptionRow,
    half_width,
    one_path,
    usual_draft_beams,
    usual_draft_length,
    usual_draft_policy,
    usual_drafter,
    usual_width_policy,
)
from dsbd_ort.decoding.option_values import (
    Biases,
    Number,
    Objects,
    OneOf,
    Texts,
    TokenSequences,
    Whole,
    Wholes,
    did_you_mean,
    shown,
)
from dsbd_ort.decoding.strategies import STRATEGIES, named_strategy

MOST_BEAMS = MOST_LAYERS = 1024
USUAL_BEAMS = 4
MOST_TOP_LOGPROBS = 20  # as OpenAI allows
_MOST = 2**31 - 1
_LARGEST = sys.float_info.max
_TOKENS = Wholes(Whole(0, _MOST), 65_536, is_ordered=False, noun="token id", is_always_list=True)
_TOKEN = Whole(0, _MOST)
_FLAG = OneOf((False, True))

OPTION_TABLE = {  # resolved in this order: what decides stands above what it decides
    "strategy": OptionRow(
        help=f"One of {', '.join(STRATEGIES)} [dsbd; at temperature 0 speculative-beam-search].",
        section=BEAMS,
        domain=OneOf(tuple(STRATEGIES), is_quoted=False),
        default=lambda o: named_strategy("dsbd", is_cold=o.is_cold),
        is_usual=True,
    ),
    "num_beams": OptionRow(
        help="W, beams of the output [4; 1 for strategies with a single beam].",
        section=BEAMS,
        domain=Whole(1, MOST_BEAMS),
        default=lambda _: USUAL_BEAMS,
        needs=(HAS_BEAMS,),
        neutral=(1,),
        of_model="search",
        is_usual=True,
    ),
    "coupling": OptionRow(
        help="How draft and target draw: gumbel (the output does not depend on the draft) or "
        "rejection (the paper's) [gumbel for strategies that sample].",
        section=DRAFTS,
        domain=OneOf(("gumbel", "rejection")),
        default=lambda _: "gumbel",
        needs=(SAMPLES,),
        neutral=(None,),
    ),
    "width_policy": OptionRow(
        help="fixed: every layer has all beams, as in beam sampling. threshold (dsbd only): as "
        "many beams as are likely to be accepted [fixed, unless one of the next two is given].",
        section=DRAFTS,
        domain=OneOf(("fixed", "threshold")),
        default=usual_width_policy,
        needs=(DSBD,),
        neutral=("fixed",),
    ),
    "drafter": OptionRow(
        help="What drafts: model; ngram (no model: what followed the last tokens earlier in this "
        "text and in others); model+ngram (n-grams only for long repetitions); none "
        "[model; ngram if the bundle has no draft].",
        section=DRAFTS,
        domain=OneOf(("model", "ngram", "model+ngram", "none")),
        default=usual_drafter,
        needs=(FREE_OF_THE_DRAFT,),
        neutral=lambda o: ("model" if o.row.has_draft else "none",),
    ),
    "draft_policy": OptionRow(
        help="fixed: draft_length layers of draft_beams candidates. throughput: as many as are "
        "expected to pay, at most those [throughput if it cannot change the output and neither "
        "number is given].",
        section=DRAFTS,
        domain=OneOf(("fixed", "throughput")),
        default=usual_draft_policy,
        needs=(FREE_OF_THE_DRAFT, DRAFTING),
        neutral=("fixed",),
    ),
    "draft_length": OptionRow(
        help="Layers of a drafted forest [4; throughput: at most 8].",
        section=DRAFTS,
        domain=Whole(0, MOST_LAYERS),
        default=usual_draft_length,
        needs=(HAS_DRAFT, DRAFTING),
        neutral=(0,),
    ),
    "draft_beams": OptionRow(
        help="Candidates of every drafted layer, or of each: 4,4,2 "
        "[num_beams, or 4 for one beam; throughput: at most 4 times as many].",
        section=DRAFTS,
        domain=Wholes(Whole(1, MOST_NODES), MOST_LAYERS, is_ordered=True),
        default=usual_draft_beams,
        needs=(HAS_DRAFT, DRAFTED_LAYERS, HAS_DRAFT_TREE),
        neutral=one_path,
    ),
    "min_beams": OptionRow(
        help="Fewest beams that threshold keeps [half of num_beams].",
        section=DRAFTS,
        domain=Whole(1, MOST_BEAMS),
        default=half_width,
        needs=DYNAMIC_WIDTH,
        neutral=lambda o: (None, o.num_beams, half_width(o)),
    ),
    "accept_threshold": OptionRow(
        help="Probability with which threshold requires a layer to be accepted.",
        section=DRAFTS,
        domain=Number(0.0, 1.0),
        default=USUAL_THRESHOLD,
        needs=DYNAMIC_WIDTH,
    ),
    "memory": OptionRow(
        help="forest: continue with all beams. single (dsbd only): after every iteration with the "
        "one of highest log-probability per token.",
        section=DRAFTS,
        domain=OneOf(("forest", "single")),
        default="forest",
        needs=(DSBD,),
    ),
    "replacement": OptionRow(
        help="Draw beams with replacement (the paper's theorem) instead of distinct ones.",
        section=DRAFTS,
        domain=_FLAG,
        default=False,
        needs=(SAMPLES, SEVERAL_DRAWS),
    ),
    "temperature": OptionRow(
        help="Sampling temperature, of both models; 0 draws nothing.",
        section=SAMPLING,
        domain=Number(0.0, _LARGEST, least_positive=1e-6),  # a logit divided by it stays finite
        default=1.0,
        needs=(NO_SEARCH,),
        neutral=(1.0, 0.0),
        of_model="any",
        http="as in DecodingConfig; with 0 and no `strategy` nothing is drawn",
        is_usual=True,
    ),
    "top_k": OptionRow(
        help="Draw from the k most probable tokens; 0 or -1: from all.",
        section=SAMPLING,
        domain=Whole(0, _MOST, off=-1),
        default=0,
        needs=(NO_SEARCH,),
        is_redundant=lambda o: o.is_cold,  # the best token is in every such set
        of_model="any",
        http="as in DecodingConfig; -1 is 0, all tokens",
        is_usual=True,
    ),
    "top_p": OptionRow(
        help="Draw from the smallest set of tokens of this probability; 1: from all.",
        section=SAMPLING,
        domain=Number(0.0, 1.0, is_open=True),
        default=1.0,
        needs=(NO_SEARCH,),
        is_redundant=lambda o: o.is_cold,
        of_model="any",
        http="as in DecodingConfig",
        is_usual=True,
    ),
    "min_p": OptionRow(
        help="Draw from tokens of at least this share of the best token's probability.",
        section=SAMPLING,
        domain=Number(0.0, 1.0),
        default=0.0,
        needs=(NO_SEARCH,),
        is_redundant=lambda o: o.is_cold,
        of_model="any",
        http="as in DecodingConfig",
    ),
    "typical_p": OptionRow(
        help="Draw from the fewest tokens nearest to the entropy that have this probability "
        "(locally typical sampling); 1: from all.",
        section=SAMPLING,
        domain=Number(0.0, 1.0, is_open=True),
        default=1.0,
        needs=(NO_SEARCH,),
        of_model="any",
    ),
    "repetition_penalty": OptionRow(
        help="Divides positive logits of tokens that occur in prompt or output, multiplies "
        "negative ones; above 1: fewer of them.",
        section=PENALTIES,
        domain=Number(1e-6, 1e6),
        default=1.0,
        is_processor=True,
        of_model="any",
        http="as in DecodingConfig: of tokens in prompt and answer",
    ),
    "presence_penalty": OptionRow(
        help="Subtracted from the logits of tokens that occur in the output.",
        section=PENALTIES,
        domain=Number(-1e6, 1e6),
        default=0.0,
        is_processor=True,
        http="as in DecodingConfig: counts the answer's tokens",
    ),
    "frequency_penalty": OptionRow(
        help="The same, once for each time that the token occurs.",
        section=PENALTIES,
        domain=Number(-1e6, 1e6),
        default=0.0,
        is_processor=True,
        http="as in DecodingConfig: counts the answer's tokens",
    ),
    "no_repeat_ngram_size": OptionRow(
        help="No n-gram of this size occurs twice in prompt and output; 0: off.",
        section=PENALTIES,
        domain=Whole(0, 1024),
        default=0,
        is_processor=True,
        of_model="any",
    ),
    "encoder_no_repeat_ngram_size": OptionRow(
        help="No n-gram of this size of the source, or of the prompt if there is no source, occurs "
        "in the output; 0: off.",
        section=PENALTIES,
        domain=Whole(0, 1024),
        default=0,
        is_processor=True,
        of_model="any",
    ),
    "bad_words_ids": OptionRow(
        help="Token sequences that never occur in the output, as JSON: [[5], [7, 8]].",
        section=PENALTIES,
        domain=TokenSequences(4096, 256),
        default=(),
        is_processor=True,
        of_model="any",
    ),
    "logit_bias": OptionRow(
        help='Added to the logits of tokens, as JSON: {"5": -1.5}.',
        section=PENALTIES,
        domain=Biases(4096, Number(-1e9, 1e9)),
        default=(),
        is_processor=True,
        http="token ids and what is added to their logits",
    ),
    "suppress_tokens": OptionRow(
        help="Token ids that never occur in the output.",
        section=PENALTIES,
        domain=_TOKENS,
        default=(),
        is_processor=True,
        of_model="any",
    ),
    "begin_suppress_tokens": OptionRow(
        help="Token ids that are not the first of the output.",
        section=PENALTIES,
        domain=_TOKENS,
        default=(),
        is_processor=True,
        of_model="any",
    ),
    "no_timestamps_token_id": OptionRow(
        help="Of a speech model, the token before its times: the output has times by Whisper's "
        "rules.",
        section=PENALTIES,
        domain=_TOKEN,
        is_processor=True,
    ),
    "max_initial_timestamp_index": OptionRow(
        help="The last of these times that the output may begin with [any].",
        section=PENALTIES,
        domain=_TOKEN,
        needs=(HAS_TIMES,),
    ),
    "last_timestamp_token_id": OptionRow(
        help="The last of these times [the last token].",
        section=PENALTIES,
        domain=_TOKEN,
        needs=(HAS_TIMES,),
    ),
    "max_new_tokens": OptionRow(
        help="Longest continuation, the end-of-sequence token included; with --chat up to 2048.",
        section=END,
        domain=Whole(1, _MOST),
        default=64,
        of_model="any",
        is_usual=True,
        is_set_by_server=False,
    ),
    "min_new_tokens": OptionRow(
        help="The output has at least this many tokens; stop strings are looked for after them.",
        section=END,
        domain=Whole(0, _MOST),
        default=0,
        is_processor=True,
        of_model="any",
    ),
    "stop_strings": OptionRow(
        help="End at this text, which is cut off. May be repeated.",
        section=END,
        domain=Texts(256, 4096),
        default=lambda _: (),
        is_usual=True,
    ),
    "eos_token_id": OptionRow(
        help="Token ids that end a sequence [the model's own].",
        section=END,
        domain=Wholes(
            Whole(0, _MOST), 1024, is_ordered=False, noun="token id", is_always_list=True
        ),
    ),
    "forced_eos_token_id": OptionRow(
        help="The token that ends an output of max_new_tokens.",
        section=END,
        domain=_TOKEN,
        is_processor=True,
        of_model="encoder-decoder",
    ),
    "forced_bos_token_id": OptionRow(
        help="The first new token if the prompt is one token, as of an encoder-decoder.",
        section=END,
        domain=_TOKEN,
        is_processor=True,
        of_model="encoder-decoder",
    ),
    "constraint": OptionRow(
        help="Which texts may follow.",
        section=CONSTRAINT,
        domain=Objects(
            (("start", "advance", "allowed", "accepts", "has_ended"), ("bind",)),
            "a constraint, such as dsbd_ort.JsonSchema or {'regex': '[0-9]+'}",
        ),
        is_processor=True,
        http=None,
        is_set_by_server=False,
    ),
    "logits_processors": OptionRow(
        help="Functions (path, scores) -> scores of the caller, applied after those above. path: "
        "prompt and new tokens, (num_tokens,) int64; scores: (vocab_size,) float64.",
        section=PENALTIES,
        domain=Objects(
            (("__call__",),), "a list of functions of a path and its scores", is_list=True
        ),
        default=(),
        is_processor=True,
        http=None,
        is_set_by_server=False,
    ),
    "seed": OptionRow(  # taken by searches too: clients send it
        help="Same seed, same output [random; it is reported].",
        section=SAMPLING,
        domain=Whole(0, 2**128 - 1),
        http="a request without one gets a random seed, which the response returns",
        is_usual=True,
    ),
    "num_return_sequences": OptionRow(
        help="How many of the final beams to return, best first.",
        section=BEAMS,
        domain=Whole(1, MOST_BEAMS),
        default=1,
        needs=(HAS_BEAMS,),
        http="number of the final beams of one request",
        is_set_by_server=False,
    ),
    "length_penalty": OptionRow(  # of one sequence too: ``score`` says it, best_of ranks by it
        help="Sequences are ranked by logprob / num_new_tokens ** length_penalty.",
        section=BEAMS,
        domain=Number(-30.0, 30.0),  # num_new_tokens to the power of it stays finite
        default=1.0,
        of_model="search",
        http="as in DecodingConfig: of every strategy",
    ),
    "early_stopping": OptionRow(
        help="When a request with beams may end before all of them have. true: as soon as enough "
        "sequences have ended; false: if no live beam scores more than these now; never: if none "
        "can score more within max_new_tokens.",
        section=BEAMS,
        domain=OneOf((False, True, "never")),
        default=False,
        needs=(HAS_BEAMS, EVERY_BEAM),
        of_model="search",
    ),
    "joint_threshold": OptionRow(
        help="Of mjsd: joint likelihood ratio that accepted tokens must exceed [0.1].",
        section=JOINT,
        domain=Number(0.0, _LARGEST, is_open=True),
        default=lambda _: 0.1,
        needs=(MJSD,),
    ),
    "joint_tokens": OptionRow(
        help="Of mjgd: tokens decided jointly [4].",
        section=JOINT,
        domain=Whole(1, _MOST),
        default=lambda _: 4,
        needs=(MJGD,),
    ),
    "joint_beams": OptionRow(
        help="Of mjgd: beams that search them [4].",
        section=JOINT,
        domain=Whole(1, MOST_BEAMS),
        default=lambda _: 4,
        needs=(MJGD,),
    ),
    "top_logprobs": OptionRow(
        help="Most probable tokens to return with every new one, in the JSON.",
        section=OUTPUT,
        domain=Whole(0, MOST_TOP_LOGPROBS),
        default=0,
        http=None,
        is_set_by_server=False,
    ),
    "prompt_logprobs": OptionRow(
        help="Return the log-probabilities of the prompt's tokens, in the JSON.",
        section=OUTPUT,
        domain=_FLAG,
        default=False,
        http=None,
        is_set_by_server=False,
    ),
    "skip_special_tokens": OptionRow(
        help="Leave special tokens out of the text.",
        section=OUTPUT,
        domain=_FLAG,
        default=True,
        http="as in DecodingConfig",
    ),
}

PROCESSORS = tuple(name for name, row in OPTION_TABLE.items() if row.is_processor)
IN_PYTHON_ALONE = ("logits_processors",)
"""Options whose values no text or JSON can give."""
_DEFAULTS = {
    name: None if callable(row.default) else row.default for name, row in OPTION_TABLE.items()
}
_DEPENDENT = tuple(n for n, row in OPTION_TABLE.items() if row.needs or callable(row.default))


def read_option(name: str, value: object) -> Any:
    """Return a value in its plain form, None if None may be given and stands for the default.

    Raises:
        ConfigError: it is no value of the option.
    """
    row = OPTION_TABLE[name]
    if value is row.default or (value is None and row.takes_none):
        return value
    return row.domain.read(name, value)


def read_options(given: Mapping[str, object]) -> dict[str, Any]:
    """Return options in their plain form.

    Raises:
        ConfigError: there is no such option, or it has no such value.
    """
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
