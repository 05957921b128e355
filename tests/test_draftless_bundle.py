"""A bundle without a draft: strategies run as with one, drafts are n-grams, a model is refused."""

import json
import re
import shutil
from pathlib import Path

import httpx2
import pytest

from dsbd_ort import Pipeline, Service
from dsbd_ort.benchmark.bench_run import DEFAULT_STRATEGIES
from dsbd_ort.cli import bench, inspect, run
from dsbd_ort.decoding import STRATEGIES
from dsbd_ort.embedding.calls import OpenPipelines, answer, opening
from dsbd_ort.openai_server.app import create_app
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_runtime.errors import InputError
from tests.commands.calls import answered, called
from tests.openai_server.running_server import MODEL, running_server
from tests.runtime.bundle_edits import without_draft
from tests.runtime.tiny_graph import TinyModel

ALONE = {
    "sample": {"top_k": 20},
    "beam-sample": {"num_beams": 3},
    "greedy": {},
    "beam-search": {"num_beams": 2},
    "mjgd": {},
}
DRAFTING = {  # by n-grams, where there is no draft
    "dsbd": {"num_beams": 2},
    "speculative": {},
    "tree-speculative": {"draft_beams": 3},
    "speculative-beam-search": {"num_beams": 2},
}
PROMPT = "ab ab ab"
NO_MODEL = [  # (options, what is said of them)
    ({"strategy": "mjsd"}, "strategy is 'mjsd', which needs a draft model, but the bundle has no"),
    ({"drafter": "model"}, "drafter is 'model', but the bundle has no draft: expected 'ngram' or"),
    ({"drafter": "model+ngram"}, "drafter is 'model.ngram', but the bundle has no draft: expected"),
    ({"strategy": "speculative-beam-search", "drafter": "model"}, "drafter is 'model', but"),
]
FIX = "or add a draft with: dsbd-export --bundle BUNDLE --draft DRAFT"


@pytest.fixture(scope="module")
def draftless(tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draftless") / "bundle"
    return without_draft(Path(shutil.copytree(tiny_bundle.path, folder)), TinyModel()).path


def options_of(strategy, seed=5):
    return {
        "strategy": strategy,
        "max_new_tokens": 8,
        "seed": seed,
        **(ALONE | DRAFTING)[strategy],
    }


@pytest.mark.parametrize("strategy", ALONE)
def test_strategies_without_a_draft_give_the_tokens_of_the_pair(tiny_bundle, draftless, strategy):
    options = options_of(strategy)
    with Pipeline.from_bundle(tiny_bundle.path) as pair, Pipeline.from_bundle(draftless) as alone:
        assert (pair.has_draft, alone.has_draft) == (True, False)
        for prompt in ("ab", "abc"):  # the second begins with rows of the first
            wanted, found = (each.generate(prompt, **options) for each in (pair, alone))
            assert found.sequences == wanted.sequences
            assert (found.stats.target_calls, found.stats.draft_calls) == (
                wanted.stats.target_calls,
                0,
            )
            peaks = [each.stats.kv_bytes_peak or 0 for each in (found, wanted)]
            assert 0 < peaks[0] < peaks[1]
        pieces = list(alone.stream("ab", **options))
    assert pieces


def tokens(results):
    return [[sequence.token_ids for sequence in result.sequences] for result in results]


def test_every_strategy_but_mjsd_is_tried_here():
    assert {*ALONE, *DRAFTING, "mjsd"} == set(STRATEGIES)


@pytest.mark.parametrize("strategy", DRAFTING)
def test_strategies_that_draft_do_so_by_n_grams_and_give_the_same(tiny_bundle, draftless, strategy):
    options = {**options_of(strategy), "draft_length": 3, "max_new_tokens": 16}
    with Pipeline.from_bundle(tiny_bundle.path) as pair, Pipeline.from_bundle(draftless) as alone:
        wanted, found = (each.generate(PROMPT, **options) for each in (pair, alone))
        together = alone.generate([PROMPT, PROMPT, "x"], **options)
        assert alone.config({"strategy": strategy}).drafter == "ngram"
        assert pair.config({"strategy": strategy}).drafter == "model"
    assert tokens([found, together[0], together[1]]) == tokens([wanted] * 3)
    assert found.stats.num_draft_tokens > 0
    assert (found.stats.draft_calls, found.stats.draft_rows) == (0, 0)
    assert wanted.stats.draft_calls > 0


@pytest.mark.parametrize(("options", "said"), NO_MODEL)
def test_a_request_that_needs_a_draft_model_is_refused(draftless, options, said):
    with Pipeline.from_bundle(draftless) as pipeline:
        for ask in (
            lambda: pipeline.generate("ab", **options),
            lambda: pipeline.generate(["ab", "c"], **options),
            lambda: next(pipeline.stream("ab", **options)),
        ):
            with pytest.raises(InputError, match=f"{said}.*{FIX}"):
                ask()
        with Service(pipeline) as service, pytest.raises(InputError, match=f"{said}.*{FIX}"):
            service.generate("ab", **options)
        pipeline.generate("ab", strategy="greedy", max_new_tokens=1)


def test_a_provider_for_the_draft_is_refused(draftless):
    with pytest.raises(InputError, match=r"draft_provider is 'cpu', but the bundle .* no draft"):
        Pipeline.from_bundle(draftless, draft_provider="cpu")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (run, ["--prompt", "ab", "--strategy", "mjsd"]),
        (bench, ["--strategies", "dsbd,mjsd"]),
        (bench, ["--run", "dsbd", "--run", "mjsd"]),
    ],
)
def test_a_command_says_so_in_one_line(draftless, command, arguments):
    done = called(command, draftless, *arguments)
    assert done.exit_code == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert len(errors) == 1 and NO_MODEL[0][1] in errors[0]
    assert "warming up" not in done.stderr  # before anything is measured


def test_dsbd_run_answers_a_prompt_and_a_file(draftless, tmp_path):
    settings = ("--num-beams", 2, "--max-new-tokens", 4, "--seed", 1)
    done = called(run, draftless, "--prompt", "ab", "--json", *settings)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["stats"]["draft_calls"] == 0
    lines = [{"prompt": "ab"}, {"prompt": "b"}, {"prompt": "c", "drafter": "model"}]
    answers = []
    for more in ((), ("--concurrency", 2)):
        folder = tmp_path / str(len(more))
        folder.mkdir()
        answers.append(answered(draftless, folder, lines, *settings, *more))
    alone, together = (
        [[sequence["text"] for sequence in fields.get("sequences", [])] for fields in lines]
        for lines in answers
    )
    assert alone == together and [len(texts) for texts in alone] == [1, 1, 0]
    assert "drafter is 'model', but the bundle has no draft" in json.dumps(answers[0][2]["error"])


def test_dsbd_bench_measures_the_default_strategies(draftless, tmp_path):
    report = tmp_path / "report.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\n")
    done = called(
        bench, draftless, "--prompts", prompts, "--repetitions", 1, "--max-new-tokens", 3,
        "--num-beams", 2, "--json", report, "--threads", 1,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads(report.read_text())
    drafters = {each["settings"]["strategy"]: each["settings"]["drafter"] for each in found["runs"]}
    assert drafters == {
        name: "ngram" if STRATEGIES[name].has_draft else "none" for name in DEFAULT_STRATEGIES
    }
    assert all(each["comparison"]["is_identical"] for each in found["runs"] if each["comparison"])
    assert found["bundle"]["draft"] is None
    assert found["bundle"]["target"]["family"] == "tiny"


def test_dsbd_inspect_names_the_command_that_adds_one(draftless, tiny_bundle):
    command = f"dsbd-export --bundle {draftless} --draft DRAFT"
    done = called(inspect, draftless, "--verify")
    assert done.exit_code == 0 and command in done.stdout
    assert "add a draft with" not in called(inspect, tiny_bundle.path).stdout
    done = called(inspect, draftless, "--verify", "--json")
    assert json.loads(done.stdout)["draft"] is None


def test_the_c_library_answers(tiny_bundle, draftless):
    pipelines = OpenPipelines()
    numbers = [
        pipelines.open(*opening(str(path).encode(), None)) for path in (tiny_bundle.path, draftless)
    ]
    pair, alone = (pipelines.service(number) for number in numbers)
    for strategy in (*ALONE, *DRAFTING):
        wanted, found = (
            answer(service, "ab", options_of(strategy), lambda step: True)
            for service in (pair, alone)
        )
        assert tokens([found]) == tokens([wanted])
    with pytest.raises(InputError, match=NO_MODEL[0][1]):
        answer(alone, "ab", {"strategy": "mjsd"}, lambda step: True)
    assert answer(alone, "ab", {}, lambda step: True) is not None
    for number in numbers:
        pipelines.close(number)


SERVED = [  # (fields of the body, strategy that the answer has)
    ({}, "speculative"),
    ({"temperature": 0}, "speculative-beam-search"),
    ({"num_beams": 2}, "dsbd"),
    ({"use_beam_search": True, "n": 2}, "speculative-beam-search"),
    ({"strategy": "beam-sample"}, "beam-sample"),
    ({"strategy": "mjgd"}, "mjgd"),
]


def test_dsbd_serve_answers_by_its_defaults(draftless):
    with (
        Pipeline.from_bundle(draftless) as pipeline,
        Service(pipeline) as service,
        running_server(service) as server,
    ):

        def ask(**fields):
            body = {"model": MODEL, "prompt": "ab", "max_tokens": 6, "seed": 3, **fields}
            return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)

        for fields, strategy in SERVED:
            response = ask(**fields)
            assert response.status_code == 200, response.text
            assert response.json()["dsbd"]["strategy"] == strategy
        for options, said in NO_MODEL:
            refused = ask(**options)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == ("strategy" if "mjsd" in options.values() else "drafter")
            assert re.match(said, error["message"])
            assert str(draftless) not in refused.text  # clients learn no folders
        assert httpx2.get(f"{server.url}/metrics", timeout=60).status_code == 200


@pytest.mark.parametrize(("defaults", "said"), NO_MODEL)
def test_a_server_whose_default_needs_a_model_does_not_start(draftless, defaults, said):
    with Pipeline.from_bundle(draftless) as pipeline, Service(pipeline) as service:
        with pytest.raises(InputError, match=said):
            create_app(service, ServingSettings(model_name=MODEL, defaults=defaults))
