"""Any options with any prompt either work or are refused by a DsbdError, and leave no trace."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsbd_errors import DsbdError
from dsbd_ort import DecodingConfig
from dsbd_ort.decoding import ConfigError
from dsbd_ort.decoding.option_table import IN_PYTHON_ALONE
from tests.robustness.odd_values import FLOATS, NUMBERS, ODD, SENSIBLE

WORKS = {"num_beams": 2, "max_new_tokens": 4, "seed": 7}
NAMES = sorted(DecodingConfig.__dataclass_fields__)


def values_of(name):
    odd = st.sampled_from([*NUMBERS, *FLOATS, *ODD])
    return st.integers(0, 9).flatmap(
        lambda draw: st.sampled_from(SENSIBLE[name]) if draw else odd  # one in ten is odd
    )


options_of_requests = st.lists(st.sampled_from(NAMES), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(name) for name in names})
)
prompts = st.one_of(
    st.text(alphabet="abcdef", min_size=1, max_size=20),
    st.text(max_size=20),
    st.text(alphabet=st.characters(categories=["Cs", "Cc", "Lo"]), max_size=5),
    st.lists(st.integers(0, 257), min_size=1, max_size=20),
    st.lists(st.integers(-2, 260), max_size=20),
    st.lists(st.sampled_from([256, 257]), max_size=5),
    st.lists(st.sampled_from([1, 1.5, None, "a", True, 2**70, -(10**400), math.nan]), max_size=3),
    st.sampled_from([None, 3, b"abc", {"a": 1}, object(), 1.5, "", "\0", "\ud800"]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=options_of_requests, prompt=prompts)
def test_any_request_works_or_is_refused(small_pipe, options, prompt):
    try:
        found = small_pipe.generate(prompt, **{"max_new_tokens": 4, **options})
    except DsbdError as error:
        assert 10 < len(str(error)) < 1000
    else:
        for result in found if isinstance(found, list) else [found]:  # a list of texts
            assert 1 <= len(result.sequences[0].token_ids) <= options.get("max_new_tokens", 4)
            assert math.isfinite(result.sequences[0].score)


json_like = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.text(alphabet="\n\t'\\\ud800\ufffd", max_size=5),
        st.sampled_from([*NUMBERS, *FLOATS, *ODD, "x" * 10**4, [1] * 2000, ["a"] * 2000]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
any_options = st.lists(st.sampled_from(NAMES), max_size=8, unique=True).flatmap(
    lambda names: st.fixed_dictionaries(
        {name: st.one_of(json_like, st.sampled_from(SENSIBLE[name])) for name in names}
    )
)


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=any_options, unknown=st.none() | st.text())
def test_any_options_make_a_config_or_a_short_refusal(options, unknown):
    try:
        config = DecodingConfig(**(options if unknown is None else {**options, unknown: 1}))
    except ConfigError as error:
        message = str(error)
        assert 10 < len(message) <= 500 and message.isprintable()
    else:
        assert unknown is None or unknown in NAMES
        assert DecodingConfig(**vars(config)) == config
        hash(config)
        objects = ("constraint", *IN_PYTHON_ALONE)
        plain = {name: value for name, value in vars(config).items() if name not in objects}
        json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize("prompt", ["a" * 10**6, [1] * 10**6, "\0" * 63, "\ud800" * 10**6])
def test_a_long_or_foul_prompt_is_refused(small_pipe, prompt):
    with pytest.raises(DsbdError):
        small_pipe.generate(prompt, **WORKS)


@pytest.mark.parametrize("prompt", ["\0", [256, 257, 256], [5], "é", "\N{PILE OF POO}"])
def test_an_odd_prompt_works(small_pipe, prompt):
    assert small_pipe.generate(prompt, **WORKS).sequences


REFUSED = [  # (option, value, words)
    ("eos_token_id", 1.5, "eos_token_id is 1.5; expected a token id or a list"),
    ("eos_token_id", [1, [2]], r"eos_token_id has \[2\]; expected token ids from 0"),
    ("num_beams", "4", "num_beams is '4'; expected a whole number"),
    ("num_beams", 10**9, "num_beams is 1000000000; expected at most 1024"),
    ("draft_length", 10**18, "draft_length is 1000000000000000000; expected at most 1024"),
    ("draft_beams", 1.5, "draft_beams is 1.5; expected a whole number or a list"),
    ("draft_beams", 10**6, "draft_beams is 1000000; expected at most 16384"),
    ("draft_beams", 10**4, "draft_beams and draft_length make a forest of 40000 candidates"),
    ("strategy", ["dsbd"], r"strategy is \['dsbd'\]; expected one of dsbd"),
    ("early_stopping", 1, "early_stopping is 1; expected one of False, True, 'never'"),
    ("temperature", None, "temperature is None; expected a number"),
    ("temperature", 5e-324, "temperature is 5e-324; expected 0 or at least 1e-06"),
    (
        "temperature",
        10**400,
        "temperature is a number of 1329 bits; expected a finite number, 0 or more",
    ),
    ("length_penalty", 1e308, r"length_penalty is 1e\+308; expected a number from -30 to 30"),
    ("length_penalty", math.nan, "length_penalty is nan; expected a number"),
    ("top_k", "all", "top_k is 'all'; expected a whole number"),
    ("seed", 1.0, "seed is 1.0; expected a whole number"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_a_wrong_value_is_named_with_what_was_expected(name, value, words):
    with pytest.raises(ConfigError, match=words):
        DecodingConfig(**{name: value})
