"""Options: what is resolved, what is refused and how the refusal reads."""

from __future__ import annotations

import pytest

from dsbd_ort.decoding import ConfigError, DecodingConfig


def test_defaults_are_resolved_by_strategy():
    dsbd = DecodingConfig()
    assert (dsbd.num_beams, dsbd.width_policy, dsbd.min_beams) == (4, "threshold", 2)
    assert dsbd.layer_widths == (4, 4, 4, 4)
    sample = DecodingConfig(strategy="sample")
    assert (sample.num_beams, sample.width_policy, sample.layer_widths) == (1, "fixed", ())
    assert DecodingConfig(strategy="speculative").layer_widths == (1, 1, 1, 1)


REFUSED = [  # (options, words of the message)
    ({"strategy": "beam"}, "strategy is 'beam'; expected one of dsbd"),
    ({"num_beams": 0}, "num_beams is 0; expected at least 1"),
    ({"num_beams": 2.5}, "num_beams is 2.5; expected a whole number"),
    ({"num_beams": True}, "num_beams is True"),
    ({"strategy": "sample", "num_beams": 2}, "num_beams is 2, but strategy sample has one beam"),
    ({"strategy": "beam-sample", "draft_length": 3}, "draft_length is 3"),
    ({"strategy": "beam-sample", "width_policy": "threshold"}, "width_policy is 'threshold'"),
    ({"strategy": "speculative", "draft_beams": 2}, "draft_beams is 2, but strategy speculative"),
    ({"width_policy": "wide"}, "width_policy is 'wide'; expected one of"),
    ({"num_beams": 2, "min_beams": 3}, "min_beams is 3, more than num_beams 2"),
    ({"draft_beams": (4, 4), "draft_length": 3}, "draft_beams (4, 4) has 2 layers"),
    ({"draft_beams": (4, 1, 4, 4)}, "narrower than 2"),
    ({"draft_beams": 3, "width_policy": "fixed"}, "narrower than 4"),
    ({"temperature": 0.0}, "temperature is 0, but strategy dsbd samples"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 0.0}, "top_p is 0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"num_return_sequences": 3}, "num_return_sequences is 3, but as few as 2"),
    ({"accept_threshold": 1.2}, "accept_threshold is 1.2"),
    ({"eos_token_id": -2}, "eos_token_id is -2"),
    ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ({"seed": -1}, "seed is -1"),
    ({"beams": 3}, "unknown option 'beams'"),
    ({"strategy": "mjsd", "num_beams": 2}, "num_beams is 2, but strategy mjsd has one beam"),
    ({"strategy": "mjsd", "width_policy": "threshold"}, "width_policy is 'threshold'"),
    ({"strategy": "beam-search", "coupling": "gumbel"}, "coupling is 'gumbel', which means noth"),
    ({"strategy": "beam-search", "temperature": 0.7}, "temperature is 0.7, which means nothing"),
    ({"strategy": "greedy", "top_k": 5}, "top_k is 5, which means nothing to strategy greedy"),
    ({"strategy": "greedy", "top_p": 0.5}, "top_p is 0.5, which means nothing"),
    ({"strategy": "beam-search", "replacement": True}, "replacement is True, which means nothing"),
    ({"early_stopping": True}, "early_stopping is True, which means nothing to strategy dsbd"),
    ({"strategy": "beam-search", "early_stopping": "soon"}, "early_stopping is 'soon'"),
    ({"strategy": "speculative-beam-search", "draft_beams": 3}, "narrower than 4"),
    ({"joint_threshold": 0.5}, "joint_threshold is 0.5, which means nothing to strategy dsbd"),
    ({"strategy": "mjsd", "joint_beams": 2}, "joint_beams is 2, which means nothing"),
    ({"strategy": "mjgd", "joint_tokens": 0}, "joint_tokens is 0; expected at least 1"),
    ({"strategy": "mjsd", "joint_threshold": 0.0}, "joint_threshold is 0.0; expected"),
    ({"strategy": "beam-sample", "memory": "single"}, "memory is 'single', but strategy beam-s"),
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
        "strategy is 'beam-sample', but draft_policy 'throughput'",
    ),
    (
        {"draft_policy": "throughput", "strategy": "mjsd"},
        "strategy is 'mjsd', but draft_policy 'throughput'",
    ),
    ({"draft_policy": "often"}, "draft_policy is 'often'; expected one of 'fixed', 'throughput'"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_senseless_options_are_refused_with_field_and_value(options, words):
    with pytest.raises(ConfigError) as caught:
        DecodingConfig.from_options(options)
    assert words in str(caught.value)
