"""Options of the native library: the configs and refusals of Python, and numpy's random numbers."""

import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsbd_errors import DsbdError
from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from dsbd_ort.decoding.option_table import OPTION_TABLE, read_options
from dsbd_ort.requests.bundle_requests import check_drafter
from dsbd_ort.requests.option_defaults import ModelDefaults, resolve
from dsbd_runtime.bundle_files.bundle import GENERATION_CONFIG_FILE
from tests.decoding.path_constraint import PathConstraint

# As JSON, in which callers give them; most names stand for a kind of values.
VALUES = {
    "Wholes": '[0, 5, [1, 2], [], [3], -1, 2147483648, [4, -1], ["a"], "ab", {"a": 1}, [1.5]]',
    "Whole": "[0, 1, 2, 3, 4, 17, -1, 1024, 1025, 2147483647, 2147483648, 1.0, 2.5, [4],"
    ' "4", 18446744073709551615, -9223372036854775808]',
    "WholeOrName": '[0, 1, 64, 2147483647, 2147483648, -1, 1.5, "all", "auto", "none", [64]]',
    "Number": "[0, 1, 0.0, 1.0, 0.1, 0.5, 0.95, -0.5, 1.5, 1e-7, 1e-6, 30, -30.5, 2e6, 1e300,"
    ' -1e10, "1", [1.0], 1e16, 123456789012345680.0]',
    "OneOf": '[0, 1, "yes", "never", "forest"]',
    "strategy": json.dumps([*STRATEGIES, "beams", 1, "dsbd "]),
    "coupling": '["gumbel", "rejection", "Gumbel", 1]',
    "width_policy": '["fixed", "threshold", "dynamic"]',
    "drafter": '["model", "ngram", "model+ngram", "none", "draft", 2.0]',
    "predicted_text": r"""["", "a text", "it's \"so\"\n", 5, ["a"]]""",
    "draft_policy": '["fixed", "throughput", "none"]',
    "draft_beams": "[1, 3, 4, 8, 0, [4, 4], [4, 4, 2, 1], [8, 8, 8, 8, 8, 8, 8, 8], [5, 0], [],"
    ' 16384, 20000, "4,4"]',
    "draft_length": "[0, 1, 2, 4, 8, 1024, 1025, -1, 2.0]",
    "memory": '["forest", "single", "beam"]',
    "logit_bias": '[{}, {"5": 1.5, "3": -2}, [[5, 1], [2, 0.5]], {"a": 1}, {"5": "x"}, [[1, 2, 3]],'
    ' {"5": 1e10}, {"-1": 1}, 5]',
    "bad_words_ids": '[[], [[5], [7, 8]], [5, [6]], [[]], [[-1]], 5, "x", [["a"]]]',
    "stop_strings": json.dumps(
        ["end", ["a"], [], "", ["a", ""], [5], 5, "\ufffd", "x" * 4097, "ä'"]
    ),
    "seed": '[0, 1, 9223372036854775808, 18446744073709551615, -1, 1.5, "1", [1]]',
    "logits_processors": "[[]]",
    "scorers": "[[]]",
    "constraint": '[{"trie": "items.trie"}, {"trie": "a.trie", "end": "eos"}]',
}
TEXTS = {  # that are no options, and how their refusal begins
    "[1]": "options is [1]; expected a JSON object",
    '{"seed": 1': "options is invalid JSON",
    '{"seed": "\\ud800"}': "options is invalid JSON",
    '{"seed": ' + "[" * 100_000: "options is nested too deep",
    '{"seed": ' + "[" * 90 + "]" * 90 + "}": f"seed is {'[' * 77}...; expected a whole number",
    '{"top_k": "' + "ä" * 100 + '"}': f"top_k is '{'ä' * 76}...; expected a whole number",
}
CONTEXT = 512
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "constraint": [
        (
            {"regex": "a+"},
            "constraint is {'regex': 'a+'}, but the native library has no constraints",
        ),
        ({"trie": 5}, "constraint has trie 5; expected a text"),
        ({"trie": "a", "end": "x"}, "constraint has end 'x'; a trie ends with 'leaf' or 'eos'"),
        ({"trie": "a", "canonical": True}, "constraint has 'canonical' with trie"),
        ("items.trie", "constraint is 'items.trie', but the native library"),
    ],
    "scorers": [([{}], "scorers is [{}], which the native library does not support; use libdsbd")],
    "logits_processors": [("x", "logits_processors is 'x', which the native library does not")],
    "seed": [(2**64, "seed is 1.8446744073709552e+19; expected at most 18446744073709551615 in")],
    "temprature": [(1, "unknown option 'temprature'; did you mean 'temperature'?")],
}


def values_of(name: str) -> list[Any]:
    kind = type(OPTION_TABLE[name].domain).__name__
    return [*json.loads(VALUES.get(name, VALUES.get(kind, "[]"))), None, True, False]


def given_options(number: int) -> Iterator[dict[str, Any]]:
    """Yield every value of every option alone and with strategies, then combinations at random."""
    rng = random.Random(number)
    for name in OPTION_TABLE:
        for value in values_of(name):
            yield {name: value}
            yield {"strategy": rng.choice([*STRATEGIES]), name: value}
    yield from ({name: 1} for name in ("top", "numbeams", "x" * 90, "Temperature", "eos", "", "é"))
    valid = {name: [v for v in values_of(name) if is_valid(name, v)] for name in OPTION_TABLE}
    for _ in range(number):
        names = rng.sample([*OPTION_TABLE], rng.randrange(1, 8))
        drawn = {name: rng.choice(valid[name]) for name in names if valid[name]}
        yield {**({"strategy": rng.choice([*STRATEGIES])} if rng.random() < 0.8 else {}), **drawn}


def is_valid(name: str, value: object) -> bool:
    try:
        read_options(with_constraint({name: value}))
    except DsbdError:
        return False
    return True


def with_constraint(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with a constraint in place of plain data."""
    if not isinstance(options.get("constraint"), dict):
        return options
    return {**options, "constraint": PathConstraint(8, lambda path: ())}


def is_missing(found: object) -> bool:
    """Return whether the native library says that it does not have an option."""
    return "has no constraints" in str(found) or "which the native library does not" in str(found)


def fields_of(config: DecodingConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Return a config as options_test prints it."""
    fields = {name: getattr(config, name) for name in OPTION_TABLE}
    del fields["scorers"], fields["logits_processors"]
    fields["predicted_text"] = fields["predicted_text"] or ""
    fields["processes_logits"] = config.processes_logits
    fields["properties"] = [
        *(config.drafts, config.has_ngram_drafter, config.has_draft_model),
        *(config.most_draft_beams, config.smallest_width, config.widest_search),
    ]
    if (trie := options.get("constraint")) is not None:
        fields["constraint"] = [trie["trie"], trie.get("end", "")]
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain


@pytest.fixture(scope="module")
def native(native_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from the cases to what options_test prints of them."""
    file = tmp_path_factory.mktemp("options") / "cases.json"

    def run(**cases: Any) -> Any:
        file.write_text(json.dumps({"configs": [], "of_bundles": [], "seeds": [], **cases}))
        command = [native_build / "tests" / "options_test", file]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    return run


@pytest.mark.parametrize("number", [1500, pytest.param(40_000, marks=pytest.mark.long)])
def test_configs_and_refusals_equal_pythons(number: int, native: Any) -> None:
    rng = random.Random(7)
    cases, expected = [], list[Any]()
    for options in given_options(number):
        known = {"costs_are_known": rng.random() < 0.5, "has_draft": rng.random() < 0.7}
        cases.append({"options": json.dumps(options), **known})
        try:
            config = DecodingConfig(**with_constraint(options)).settled(**known)
            expected.append(fields_of(config, options))
        except DsbdError as error:
            expected.append(str(error))
    found = native(configs=cases)["configs"]
    for case, ours, theirs in zip(cases, expected, found, strict=True):
        assert theirs == ours or is_missing(theirs), case
    assert sum(isinstance(each, dict) for each in expected) > number / 5


def test_what_the_native_library_does_not_have_is_refused_by_name(native: Any) -> None:
    refused = [(name, *each) for name, several in REFUSED.items() for each in several]
    known = {"costs_are_known": True, "has_draft": True}
    cases = [{"options": json.dumps({name: value}), **known} for name, value, _ in refused]
    messages = [*(message for _, _, message in refused), *TEXTS.values()]
    cases += [{"options": text, **known} for text in TEXTS]
    for message, found in zip(messages, native(configs=cases)["configs"], strict=True):
        assert isinstance(found, str) and found.startswith(message), found


FILES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "repetition_penalty": 1.1, "max_length": 40, "num_beams": 5},
    {
        "num_beams": 4,
        "length_penalty": 2.0,
        "early_stopping": True,
        "max_length": 142,
        "min_length": 9,
    },
    {"length_penalty": -0.5, "early_stopping": "never", "min_length": 130, "max_length": 140},
    {"guidance_scale": 1.5, "num_beam_groups": 2, "token_healing": True, "top_h": 0.5},
    {"guidance_scale": 1.0, "num_beam_groups": 1, "min_length": 0, "sequence_bias": {}},
    {"top_k": 500, "no_repeat_ngram_size": 3, "bad_words_ids": [[5]], "forced_eos_token_id": 2},
    {"min_p": 0.1, "typical_p": 0.9, "max_new_tokens": 7, "suppress_tokens": [1, 2], "top_p": 1.0},
)


@pytest.mark.parametrize("number", [400, pytest.param(20_000, marks=pytest.mark.long)])
def test_defaults_of_a_bundle_equal_pythons(number: int, native: Any, tmp_path: Path) -> None:
    rng = random.Random(3)
    options = [o for o in given_options(2 * number) if "constraint" not in o and "seed" not in o]
    cases, expected = [], []
    for given in rng.sample(options, number):
        facts = {"num_top_logits": rng.choice([0, 0, 200]), "reads_source": rng.random() < 0.3}
        facts |= {"has_draft": rng.random() < 0.5, "of_chats": rng.random() < 0.3}
        file, asked = rng.choice(FILES), {**given, "seed": 1}
        cases.append({**facts, "file": json.dumps(file), "options": json.dumps(asked)})
        expected.append(_config_of_bundle(asked, _model_defaults(file, facts, tmp_path)))
    found = native(of_bundles=cases)["of_bundles"]
    for case, ours, theirs in zip(cases, expected, found, strict=True):
        assert theirs == ours or is_missing(theirs), case


def test_a_prediction_longer_than_the_context_is_cut(native: Any) -> None:
    facts = {"num_top_logits": 0, "reads_source": False, "has_draft": True, "of_chats": False}
    long_ids = [5, *range(2**17)]
    cases = [
        {**facts, "file": "{}", "options": json.dumps(given)}
        for given in ({"predicted_text": "a" * 600}, {"predicted_token_ids": long_ids})
    ]
    found = native(of_bundles=cases)["of_bundles"]
    assert found[0]["predicted_token_ids"] == [97] * CONTEXT
    assert found[1]["predicted_token_ids"] == long_ids[:CONTEXT]


def _config_of_bundle(options: dict[str, Any], model: ModelDefaults) -> Any:
    """Return the config that ``BundleRequests`` makes for a prompt of 100 tokens, or its error."""
    try:
        ends = {"eos_token_id": (2,)} if options.get("eos_token_id") is None else {}
        config = resolve({**options, **ends}, model)
        text, token_ids = config.predicted_text, config.predicted_token_ids
        if text and token_ids:
            return "predicted_text and predicted_token_ids are both given; leave out one of them"
        if text is not None:
            ids = tuple(text.encode()) or token_ids
            config = replace(config, predicted_text=None, predicted_token_ids=ids)
        config = config.settled(costs_are_known=True, has_draft=model.has_draft)
        check_drafter(config, has_draft=model.has_draft)
    except DsbdError as error:
        return str(error)
    if "max_new_tokens" not in options:
        config = replace(config, max_new_tokens=min(config.max_new_tokens, CONTEXT - 100))
    fields = fields_of(model.lengthened(config, options, 100), options)
    return {**fields, "not_built": json.loads(json.dumps(model.not_built))}


def _model_defaults(file: dict[str, Any], facts: dict[str, Any], folder: Path) -> ModelDefaults:
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps(file))
    target = SimpleNamespace(
        encoder=object() if facts["reads_source"] else None,
        head=SimpleNamespace(keeps_full=not facts["num_top_logits"]),
        logits=f"topk:{facts['num_top_logits']}",
    )
    bundle: Any = SimpleNamespace(
        path=folder,
        entry=lambda role: target,
        manifest=SimpleNamespace(files={GENERATION_CONFIG_FILE: ""}),
        roles=("target", "draft") if facts["has_draft"] else ("target",),
    )
    return ModelDefaults.from_bundle(bundle, of_chats=facts["of_chats"])


def test_random_numbers_equal_numpys(native: Any) -> None:
    seeds = [0, 1, 2**32 - 1, 2**32, 12345678901234567890, 2**64, 2**128 - 1, 2**96 + 5]
    halves = [[seed >> 64, seed & (2**64 - 1)] for seed in seeds]
    for seed, (first, *rest) in zip(seeds, native(seeds=halves)["draws"], strict=True):
        rng = np.random.default_rng(seed)
        assert first == rng.integers(2**63)
        expected = [(rng.random(), rng.standard_exponential()) for _ in range(1000)]
        assert rest == np.array(expected).ravel().view(np.int64).tolist()
