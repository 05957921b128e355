"""Options: what is resolved, what is refused and how the refusal reads."""

from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import ConfigError, DecodingConfig
from dsbd_ort.decoding.row_bounds import most_rows
from dsbd_ort.decoding.strategies import named_strategy


def test_defaults_are_resolved_by_strategy():
    dsbd = DecodingConfig()
    assert (dsbd.num_beams, dsbd.width_policy, dsbd.min_beams) == (4, "fixed", None)
    sample = DecodingConfig(strategy="sample")
    assert (sample.num_beams, sample.width_policy, sample.layer_widths) == (1, "fixed", ())


UNDECIDED: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
    ({}, (4,) * 4, (16,) * 8),  # (options, the shape without known costs, the limit with them)
    ({"num_beams": 2, "top_p": 0.5}, (2,) * 4, (8,) * 8),
    ({"num_beams": 1024}, (1024,) * 4, (2048,) * 8),
    ({"coupling": "gumbel", "width_policy": "fixed", "accept_threshold": 0.7}, (4,) * 4, (16,) * 8),
    ({"strategy": "speculative"}, (1,) * 4, (1,) * 8),
    ({"strategy": "tree-speculative"}, (4,) * 4, (16,) * 8),
    ({"strategy": "speculative-beam-search", "num_beams": 3}, (3,) * 4, (12,) * 8),
]


@pytest.mark.parametrize(("options", "fixed", "limit"), UNDECIDED)
def test_how_much_is_drafted_is_decided_where_costs_are_known(options, fixed, limit):
    config = DecodingConfig(**options)
    assert (config.draft_policy, config.draft_length) == (None, None)
    shapes = {"fixed": fixed, "throughput": limit}
    for policy, shape in shapes.items():
        settled = config.settled(costs_are_known=policy == "throughput")
        assert (settled.draft_policy, settled.layer_widths) == (policy, shape)
        assert settled == DecodingConfig(**options, drafter="model", draft_policy=policy)
        assert settled.settled(costs_are_known=True) is settled


FIXED: list[dict[str, Any]] = [
    {"draft_length": 8},
    {"draft_length": 0},
    {"draft_beams": 16},
    {"strategy": "speculative", "draft_length": 2},
    {"coupling": "rejection"},
    {"width_policy": "threshold"},
    {"min_beams": 2},
    {"accept_threshold": 0.5},
    {"memory": "single"},
    {"replacement": True},
    {"strategy": "mjsd"},
    {"strategy": "beam-sample"},
    {"strategy": "greedy"},
]


@pytest.mark.parametrize("options", FIXED)
def test_a_given_shape_and_an_output_that_follows_the_draft_have_a_fixed_draft(options):
    assert DecodingConfig(**options).draft_policy == "fixed"


def test_options_of_the_dynamic_width_choose_it():
    for options in ({"min_beams": 1}, {"accept_threshold": 0.9}, {"width_policy": "threshold"}):
        config = DecodingConfig(**options)
        assert config.width_policy == "threshold" and config.layer_widths == (4, 4, 4, 4)
    assert DecodingConfig(width_policy="threshold").min_beams == 2


REFUSED = [  # (options, words of the message); test_option_table.py has those without a meaning
    (
        {"strategy": "beam-sample", "draft_beams": 4},
        "draft_beams is 4, which means nothing to strategy beam-sample; leave it out, or set "
        "strategy to one with a draft such as dsbd",
    ),
    (
        {"draft_length": 0, "draft_beams": 4},
        "draft_beams is 4, which means nothing with draft_length 0; leave it out, or set "
        "draft_length to at least 1",
    ),
    (
        {"width_policy": "fixed", "accept_threshold": 0.5},
        "accept_threshold is 0.5, which means nothing with width_policy 'fixed'; leave it out, or "
        "set width_policy to 'threshold'",
    ),
    (
        {"draft_length": 0, "draft_policy": "throughput"},
        "draft_length is 0, which leaves draft_policy 'throughput' nothing to draft; use at least "
        "1, or draft_policy 'fixed'",
    ),
    ({"strategy": "beam-sample", "draft_beams": -5}, "draft_beams is -5; expected at least 1"),
    ({"strategy": "beam"}, "strategy is 'beam'; expected one of dsbd"),
    ({"num_beams": 0}, "num_beams is 0; expected at least 1"),
    ({"num_beams": 2.5}, "num_beams is 2.5; expected a whole number"),
    ({"num_beams": True}, "num_beams is True"),
    ({"strategy": "beam-sample", "draft_length": 3}, "draft_length is 3"),
    ({"strategy": "beam-sample", "width_policy": "threshold"}, "width_policy is 'threshold'"),
    ({"width_policy": "wide"}, "width_policy is 'wide'; expected one of"),
    ({"num_beams": 2, "min_beams": 3}, "min_beams is 3, more than num_beams 2"),
    ({"draft_beams": (4, 4), "draft_length": 3}, "draft_beams (4, 4) has 2 layers"),
    ({"draft_beams": (4, 1, 4, 4), "width_policy": "threshold"}, "narrower than 2"),
    ({"draft_beams": 3, "width_policy": "fixed"}, "narrower than 4"),
    (
        {"strategy": "dsbd", "temperature": 0.0},
        "temperature is 0, but strategy dsbd samples; use more than 0, leave strategy out",
    ),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": -2}, "top_k is -2; expected at least 0"),
    ({"top_p": 0.0}, "top_p is 0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    (
        {"num_return_sequences": 3, "width_policy": "threshold"},
        "num_return_sequences is 3, but as few as 2",
    ),
    ({"min_beams": 1, "draft_policy": "throughput"}, "min_beams is 1, which means nothing with"),
    ({"accept_threshold": 1.2}, "accept_threshold is 1.2"),
    ({"eos_token_id": -2}, "eos_token_id is -2"),
    ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ({"seed": -1}, "seed is -1"),
    ({"beams": 3}, "unknown option 'beams'"),
    ({"temprature": 1.0}, "unknown option 'temprature'; did you mean 'temperature'?"),
    ({"x": 1}, "unknown option 'x'; expected a field of DecodingConfig (docs/run.md"),
    ({"strategy": "mjsd", "width_policy": "threshold"}, "width_policy is 'threshold'"),
    ({"strategy": "beam-search", "coupling": "gumbel"}, "coupling is 'gumbel', which means noth"),
    (
        {"memory": "single", "early_stopping": True},
        "early_stopping is True, which means nothing with memory 'single'; leave it out",
    ),
    ({"strategy": "beam-search", "early_stopping": "soon"}, "early_stopping is 'soon'"),
    ({"strategy": "speculative-beam-search", "draft_beams": 3}, "narrower than 4"),
    ({"strategy": "mjgd", "joint_tokens": 0}, "joint_tokens is 0; expected at least 1"),
    ({"strategy": "mjsd", "joint_threshold": 0.0}, "joint_threshold is 0.0; expected"),
    ({"strategy": "beam-sample", "memory": "single"}, "memory is 'single', which means nothing"),
    ({"memory": "single", "num_return_sequences": 2}, "but memory 'single' ends with one beam"),
    ({"memory": "none"}, "memory is 'none'; expected one of 'forest', 'single'"),
    ({"coupling": "tight"}, "coupling is 'tight'; expected one of 'gumbel', 'rejection'"),
    (
        {"draft_policy": "throughput", "coupling": "rejection"},
        "coupling is 'rejection', but draft_policy 'throughput' needs",
    ),
    (
        {"draft_policy": "throughput", "width_policy": "threshold"},
        "width_policy is 'threshold', but draft_policy 'throughput'",
    ),
    (
        {"draft_policy": "throughput", "memory": "single"},
        "memory is 'single', but draft_policy 'throughput'",
    ),
    (
        {"draft_policy": "throughput", "replacement": True},
        "replacement is True, but draft_policy 'throughput'",
    ),
    (
        {"draft_policy": "throughput", "strategy": "beam-sample"},
        "draft_policy is 'throughput', which means nothing to strategy beam-sample",
    ),
    (
        {"draft_policy": "throughput", "strategy": "mjsd"},
        "draft_policy is 'throughput', which means nothing to strategy mjsd",
    ),
    ({"eos_token_id": 2**31}, "eos_token_id is 2147483648; expected at most 2147483647"),
    ({"eos_token_id": [3, 2**63]}, "eos_token_id has 9223372036854775808; expected token ids"),
    ({"eos_token_id": [1] * 1025}, "expected a list of at most 1024"),
    ({"eos_token_id": iter([1])}, "expected a token id or a list of them"),
    ({"draft_beams": {2, 4}, "draft_length": 2}, "draft_beams is {2, 4}; expected a whole number"),
    ({"draft_beams": [4, 4, 4, 2**40]}, "draft_beams has 1099511627776; expected whole numbers"),
    ({"draft_beams": [4, 4, 4, True]}, "draft_beams has True; expected whole numbers"),
    ({"draft_beams": range(10**18)}, "expected a list of at most 1024"),
    ({"draft_beams": np.ones((2, 2), int)}, "expected a whole number or a list of them"),
    ({"stop_strings": ["x"] * 257}, "expected a list of at most 256"),
    ({"stop_strings": "x" * 4097}, "stop_strings has a text of 4097 characters; expected at most"),
    ({"stop_strings": ["a", 5]}, "stop_strings has 5; expected a text"),
    ({"stop_strings": {"a"}}, "stop_strings is {'a'}; expected a text or a list"),
    ({"stop_strings": "\ud800"}, "stop_strings has '\\ud800', with U+FFFD or a lone surrogate"),
    ({"stop_strings": ["a\N{REPLACEMENT CHARACTER}"]}, "with U+FFFD or a lone surrogate"),
    ({"stop_strings": 7}, "stop_strings is 7; expected a text"),
    ({"stop_strings": ""}, "empty text"),
    ({"stop_strings": ["a", ""]}, "empty text"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias has ('a', 1.0); expected a token id and a number"),
    ({"bad_words_ids": [[]]}, "bad_words_ids has an empty list of token ids; drop it"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; expected a number from 1e-06"),
    ({"constraint": 3}, "constraint is 3; expected a constraint, such as dsbd_ort.JsonSchema"),
    ({"logits_processors": [3]}, "logits_processors is 3; expected a list of functions"),
    ({"num_beams": np.True_}, "num_beams is np.True_; expected a whole number"),
    ({"temperature": np.True_}, "temperature is np.True_; expected a number"),
    ({"num_beams": np.array([2, 3])}, "num_beams is array([2, 3]); expected a whole number"),
    ({"replacement": 1}, "replacement is 1; expected one of False, True"),
    ({"draft_policy": "often"}, "draft_policy is 'often'; expected one of 'fixed', 'throughput'"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_senseless_options_are_refused_with_field_and_value(options, words):
    with pytest.raises(ConfigError) as caught:
        DecodingConfig(**options)
    assert words in str(caught.value)


EXACT: list[tuple[str, Any, Any]] = [  # (option, value, its plain Python form)
    ("num_beams", np.int64(3), 3),
    ("num_beams", np.array(3), 3),
    ("draft_beams", np.array([4, 4, 5, 6]), (4, 4, 5, 6)),
    ("draft_beams", [np.int8(4)] * 4, (4, 4, 4, 4)),
    ("draft_beams", range(4, 8), (4, 5, 6, 7)),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", 2, 2.0),
    ("accept_threshold", np.float16(0.5), 0.5),
    ("top_p", np.int32(1), 1.0),
    ("replacement", np.True_, True),
    ("strategy", np.str_("dsbd"), "dsbd"),
    ("stop_strings", np.str_("end"), ("end",)),
    ("stop_strings", ["a", np.str_("b")], ("a", "b")),
    ("eos_token_id", np.int64(7), (7,)),
    ("eos_token_id", {9, 7}, (7, 9)),
    ("eos_token_id", np.array([9, 7]), (9, 7)),
    ("logit_bias", {"3": -1}, ((3, -1.0),)),
    ("bad_words_ids", [7, [1, 2]], ((7,), (1, 2))),
    ("suppress_tokens", 5, (5,)),
]


@pytest.mark.parametrize(("name", "value", "plain"), EXACT)
def test_any_exact_type_is_taken_and_stored_as_plain_python(
    name: str, value: Any, plain: Any
) -> None:
    stored = getattr(DecodingConfig(**{name: value}), name)
    assert stored == plain and type(stored) is type(plain)
    if isinstance(stored, tuple):
        assert {type(entry) for entry in stored} <= {int, str, tuple}


def test_top_k_may_be_switched_off_by_minus_one() -> None:
    assert DecodingConfig(top_k=-1) == DecodingConfig(top_k=0)
    assert DecodingConfig(strategy="beam-search", top_k=-1).top_k == 0


def test_options_given_as_numpy_numbers_decode_alike() -> None:
    given = {"num_beams": np.int64(2), "top_k": np.int32(3), "eos_token_id": np.array([4])}
    assert DecodingConfig(**given) == DecodingConfig(num_beams=2, top_k=3, eos_token_id=(4,))


def test_default_joint_options_count_like_given_ones() -> None:
    usual = DecodingConfig(strategy="mjgd")
    given = DecodingConfig(strategy="mjgd", joint_beams=4, joint_tokens=4)
    assert usual == given and most_rows(10, usual) == most_rows(10, given)
    assert (usual.joint_beams, usual.joint_tokens) == (4, 4)
    assert DecodingConfig(strategy="mjsd").joint_threshold == 0.1


@pytest.mark.parametrize(
    ("options", "strategy", "width"),
    [
        ({}, "dsbd", 4),
        ({"temperature": 0.7}, "dsbd", 4),
        ({"temperature": 0, "top_p": 0.95, "top_k": 20}, "speculative-beam-search", 4),
        ({"temperature": 0.0, "num_beams": 2}, "speculative-beam-search", 2),
    ],
)
def test_temperature_0_chooses_the_strategy_that_nobody_named(options, strategy, width):
    config = DecodingConfig(**options)
    assert (config.strategy, config.num_beams) == (strategy, width)
    assert DecodingConfig(**{**options, "strategy": strategy}) == config


AT_ZERO = [  # (default strategy, its counterpart at temperature 0)
    ("dsbd", "speculative-beam-search"),
    ("beam-sample", "beam-search"),
    ("sample", "greedy"),
    ("speculative", "speculative-beam-search"),
    ("tree-speculative", "speculative-beam-search"),
    ("beam-search", "beam-search"),
    ("mjsd", "mjsd"),
]


@pytest.mark.parametrize(("default", "strategy"), AT_ZERO)
def test_every_default_strategy_has_its_counterpart_at_temperature_0(default, strategy):
    assert named_strategy(default, is_cold=False) == default
    assert named_strategy(default, is_cold=True) == strategy
    assert DecodingConfig(strategy=strategy, temperature=0.0, top_p=0.9).strategy == strategy
