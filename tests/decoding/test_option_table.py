"""Which option means something where: all else is refused, and what is taken has an effect."""

import dataclasses
import itertools
import json
from typing import Any

import pytest

from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingConfig
from dsbd_ort.decoding.option_table import OPTION_TABLE
from tests.decoding.path_constraint import PathConstraint, some_tokens
from tests.decoding.path_scorer import PathScorer
from tests.decoding.tables import mixed_table, random_table, run

SAMPLING = {"dsbd", "beam-sample", "speculative", "tree-speculative", "sample"}
SEARCH = {"speculative-beam-search", "beam-search", "greedy"}
JOINT = {"mjsd", "mjgd"}
EVERY = {*SAMPLING, *SEARCH, *JOINT}
BEAMS = {"dsbd", "beam-sample", "speculative-beam-search", "beam-search"}
DRAFT = {"dsbd", "speculative", "tree-speculative", "speculative-beam-search", "mjsd"}


def against_the_last(path, scores):
    scores[path[-1]] -= 3.0
    return scores


MEANINGFUL = {  # option: (strategies to which it means something, a value that is not the default)
    "num_beams": (BEAMS, 3),
    "coupling": (SAMPLING, "rejection"),
    "width_policy": ({"dsbd"}, "threshold"),
    "min_beams": ({"dsbd"}, 3),
    "accept_threshold": ({"dsbd"}, 0.01),
    "drafter": (DRAFT - {"mjsd"}, "ngram"),
    "predicted_text": (DRAFT - {"mjsd"}, "def f"),
    "predicted_token_ids": (DRAFT - {"mjsd"}, (1, 2, 3)),
    "draft_policy": (DRAFT - {"mjsd"}, "throughput"),
    "draft_length": (DRAFT, 2),
    "draft_beams": (DRAFT - {"speculative"}, 6),
    "draft_context": (DRAFT, 8),
    "memory": ({"dsbd"}, "single"),
    "replacement": (SAMPLING - {"speculative", "sample"}, True),
    "temperature": (SAMPLING | JOINT, 0.3),
    "top_k": (SAMPLING | JOINT, 2),
    "top_p": (SAMPLING | JOINT, 0.3),
    "min_p": (SAMPLING | JOINT, 0.4),
    "typical_p": (SAMPLING | JOINT, 0.3),
    "repetition_penalty": (EVERY, 2.0),
    "presence_penalty": (EVERY, 2.0),
    "frequency_penalty": (EVERY, 2.0),
    "no_repeat_ngram_size": (EVERY, 2),
    "encoder_no_repeat_ngram_size": (EVERY, 2),
    "bad_words_ids": (EVERY, ((1,), (2, 3))),
    "logit_bias": (EVERY, ((1, -4.0),)),
    "suppress_tokens": (EVERY, (1, 2)),
    "begin_suppress_tokens": (EVERY, (1, 2)),
    "no_timestamps_token_id": (EVERY, 3),
    "max_initial_timestamp_index": (EVERY, 1),
    "last_timestamp_token_id": (EVERY, 3),
    "min_new_tokens": (EVERY, 6),
    "forced_bos_token_id": (EVERY, 1),
    "forced_eos_token_id": (EVERY, 5),
    "constraint": (EVERY, PathConstraint(6, some_tokens(6, always=(5,)), (5,))),
    "logits_processors": (EVERY, (against_the_last,)),
    "scorers": (EVERY, (PathScorer(6),)),
    "max_new_tokens": (EVERY, 3),
    "seed": (EVERY, 7),
    "num_return_sequences": (BEAMS, 2),
    "length_penalty": (EVERY, 2.0),
    "early_stopping": (BEAMS, True),
    "joint_threshold": ({"mjsd"}, 20.0),
    "joint_tokens": ({"mjgd"}, 2),
    "joint_beams": ({"mjgd"}, 2),
    "stop_strings": (EVERY, ("x",)),
    "eos_token_id": (EVERY, (1, 2)),
    "top_logprobs": (EVERY, 2),
    "prompt_logprobs": (EVERY, True),
    "skip_special_tokens": (EVERY, False),
}
DYNAMIC_WIDTH = {"min_beams", "accept_threshold"}  # need width_policy "threshold" and a draft
DEFAULT = {n: None if callable(r.default) else r.default for n, r in OPTION_TABLE.items()}
POLICIES: dict[str, tuple[Any, ...]] = {
    "width_policy": (None, "fixed", "threshold"),
    "draft_policy": (None, "fixed", "throughput"),
    "coupling": (None, "gumbel", "rejection"),
    "memory": ("forest", "single"),
    "draft_length": (None, 0),
}


def means_something(name: str, config: DecodingConfig) -> bool:
    if config.strategy not in MEANINGFUL[name][0]:
        return False
    if name in DYNAMIC_WIDTH:
        return config.width_policy == "threshold" and config.draft_length != 0
    if name in ("max_initial_timestamp_index", "last_timestamp_token_id"):
        return config.no_timestamps_token_id is not None
    if name == "early_stopping":
        return config.memory == "forest"
    return name != "draft_beams" or config.draft_length != 0


def settings_of(strategy: str) -> list[dict[str, Any]]:
    """Return every combination of policies that a strategy takes."""
    taken = []
    for values in itertools.product(*POLICIES.values()):
        options = {"strategy": strategy, **dict(zip(POLICIES, values, strict=True))}
        try:
            DecodingConfig(**options)
        except ConfigError:
            continue
        taken.append(options)
    return taken


def test_every_option_and_strategy_is_in_the_table() -> None:
    assert {"strategy", *MEANINGFUL} == set(DEFAULT) == set(vars(DecodingConfig()))
    assert set(STRATEGIES) == EVERY


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MEANINGFUL)
def test_an_option_means_something_or_is_refused(name: str, strategy: str) -> None:
    value = MEANINGFUL[name][1]
    settings = settings_of(strategy)
    assert settings
    for options in settings:
        options = {**options, name: value}
        try:
            config = DecodingConfig(**options)
        except ConfigError as error:
            message = str(error)
            if name not in POLICIES and not means_something(
                name, DecodingConfig(**{**options, name: DEFAULT[name]})
            ):
                assert message.startswith(f"{name} is {value!r}, which means nothing ")
            assert any(
                message.startswith(f"{given} ") and (repr(options[given]) in message)
                for given in options
            ), message
            assert "; " in message or ": " in message  # the fix
        else:
            assert means_something(name, config), config


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_strategy_takes_has_an_effect(strategy: str) -> None:
    # need texts, costs
    without_effect = {"stop_strings", "skip_special_tokens", "draft_policy", "predicted_text"}
    if STRATEGIES[strategy].rule in ("search", "joint-greedy"):
        without_effect.add("seed")  # taken everywhere: clients send it
    for name, (strategies, value) in MEANINGFUL.items():
        if strategy in strategies and name not in without_effect:
            assert has_effect(strategy, name, value), name


def has_effect(strategy: str, name: str, value: Any) -> bool:
    """Tell whether an option changes tokens, scores or statistics of any of many requests."""
    target = random_table(41, 6)
    draft = mixed_table(target, random_table(42, 6), 0.7)
    common: dict[str, Any] = {"strategy": strategy, "max_new_tokens": 12, "eos_token_id": 5}
    if name in ("min_beams", "accept_threshold"):
        common["width_policy"] = "threshold"
    if name in ("max_initial_timestamp_index", "last_timestamp_token_id"):
        common["no_timestamps_token_id"] = 1
    if name == "forced_eos_token_id":  # else all have ended before
        common["max_new_tokens"] = 2
    for seed in range(40):
        prompt = (seed % 5,) if name == "forced_bos_token_id" else (1, seed % 5, seed // 5)
        if name == "draft_context":  # of a longer prompt the draft reads the end
            prompt *= 10
        seen = []
        for options in (common, {**common, name: value}):
            config = DecodingConfig(**{"seed": seed, **options})
            uses = draft if config.row.has_draft else None
            result = run(config, target, uses, 6, config.seed, prompt)
            stats = vars(result.stats)
            counts = {key: stats[key] for key in stats if not key.endswith("_s")}
            seen.append((result.sequences, result.prompt_logprobs, counts))
        if seen[0] != seen[1]:
            return True
    return False


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resolved_config_can_be_built_again(strategy: str) -> None:
    for options in settings_of(strategy):
        config = DecodingConfig(**options)
        assert DecodingConfig(**vars(config)) == config
        assert DecodingConfig(**dataclasses.asdict(config)) == config
        assert DecodingConfig(**json.loads(json.dumps(vars(config)))) == config
        assert dataclasses.replace(config, seed=5, max_new_tokens=9).seed == 5
        hash(config)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_explicit_defaults_are_taken(strategy: str) -> None:
    plain = DecodingConfig(strategy=strategy)
    assert DecodingConfig(**{**DEFAULT, "strategy": strategy}) == plain
    for name in DEFAULT:
        assert DecodingConfig(**{"strategy": strategy, name: getattr(plain, name)}) == plain


NEUTRAL: list[dict[str, Any]] = [
    {"strategy": "greedy", "num_beams": 1, "num_return_sequences": 1, "draft_length": 0},
    {"strategy": "beam-search", "temperature": 0, "top_k": 0, "top_p": 1},
    {"strategy": "beam-search", "temperature": 0, "top_p": 0.95, "top_k": 20},
    {"strategy": "beam-search", "seed": 17},
    {"strategy": "beam-sample", "width_policy": "fixed", "min_beams": 4, "accept_threshold": 0.7},
    {"strategy": "beam-sample", "width_policy": "fixed", "min_beams": 2, "draft_beams": []},
    {"strategy": "speculative", "draft_policy": "fixed", "draft_beams": 1},
    {"strategy": "speculative", "draft_length": 4, "draft_beams": [1, 1, 1, 1], "min_beams": 1},
    {"strategy": "dsbd", "draft_length": 0, "accept_threshold": 0.7, "min_beams": 2},
]


@pytest.mark.parametrize("options", NEUTRAL)
def test_neutral_and_redundant_values_change_nothing(options: dict[str, Any]) -> None:
    config = DecodingConfig(**options)
    meant = ("strategy", "draft_policy", "draft_length", "seed")
    only = {name: options[name] for name in meant if name in options}
    assert config == DecodingConfig(**only)


def test_another_width_or_strategy_of_a_resolved_config() -> None:
    config = DecodingConfig(strategy="beam-sample")
    assert dataclasses.replace(config, num_beams=8).num_beams == 8
    assert dataclasses.replace(DecodingConfig(), width_policy="fixed").min_beams is None
