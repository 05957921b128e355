"""Target and draft of a pipeline: learned costs, acceptance estimators, kept cache rows."""

from functools import partial

import numpy as np
import pytest

from dsbd_ort import Pipeline, Service
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.drafting.ngram import NGramPool
from dsbd_ort.model_pair import MOST_ESTIMATORS
from dsbd_ort.pipeline_options import PipelineOptions
from dsbd_ort.requests.bundle_requests import MOST_CALLERS
from dsbd_ort.requests.recent import Recent
from dsbd_runtime.loading import load_pair

PROMPT = "def read_json(path):"

DEAR_TARGET = EngineCosts(CostCurve((1, 64), (1.0, 1.1)), CostCurve((1, 64), (0.01, 0.02)))
"""By which drafting pays, however busy the machine is that these tests run on."""


def test_what_is_drafted_by_default_leaves_the_tokens_of_beam_sampling(demo_bundle):
    common = {"num_beams": 2, "top_k": 20, "max_new_tokens": 40}
    with Pipeline.from_bundle(demo_bundle) as pipeline:
        pipeline.models.costs = DEAR_TARGET
        for seed in range(3):
            plain = pipeline.generate(PROMPT, strategy="beam-sample", seed=seed, **common)
            planned = pipeline.generate(PROMPT, seed=seed, **common)
            assert planned.sequences[0].token_ids == plain.sequences[0].token_ids
            assert planned.stats.num_draft_tokens > 0


@pytest.mark.parametrize("is_service", [False, True])
def test_a_first_request_makes_no_call_to_measure_and_every_request_teaches(
    tiny_bundle, is_service
):
    options = {"strategy": "speculative", "max_new_tokens": 12, "eos_token_id": ()}
    with Pipeline.from_bundle(tiny_bundle.path) as pipeline:
        guessed = pipeline.models.costs.now()
        asked = Service(pipeline) if is_service else pipeline
        first = asked.generate("x", **options)
        assert first.stats.target_calls == first.stats.num_iterations  # "x": no prompt to prefill
        learned = pipeline.models.costs.now()
        assert learned.target != guessed.target
        for _ in range(3):
            asked.generate("x", **options)
        assert pipeline.models.costs.now().target != learned.target
        asked.close()


def test_a_prompt_that_goes_on_from_the_last_computes_only_what_is_new(demo_bundle):
    options = {"num_beams": 2, "draft_length": 4, "top_k": 20, "max_new_tokens": 16, "seed": 0}
    with Pipeline.from_bundle(demo_bundle) as pipeline:
        first = pipeline.generate(PROMPT, **options)
        longer = PROMPT + first.sequences[0].text + "\n    return"
        again = pipeline.generate(longer, **options)
    with Pipeline.from_bundle(demo_bundle, prefix_cache=False) as pipeline:
        pipeline.generate(PROMPT, **options)
        alone = pipeline.generate(longer, **options)
    assert again.sequences[0].token_ids == alone.sequences[0].token_ids
    assert again.stats.target_rows < alone.stats.target_rows
    assert again.stats.kv_bytes_peak == alone.stats.kv_bytes_peak


OPTIONS = {
    "strategy": "speculative",
    "draft_policy": "throughput",
    "max_new_tokens": 1,
}
CURVE = CostCurve((1, 2), (0.001, 0.002))


@pytest.fixture
def pipeline(tiny_bundle):
    target, draft = load_pair(tiny_bundle, provider="cpu")
    return Pipeline(
        tiny_bundle,
        target,
        draft,
        options=PipelineOptions(loop="python"),  # whose estimators show what they have learned
        costs=EngineCosts(CURVE, CURVE),
    )


@pytest.mark.parametrize("is_service", [False, True])
def test_many_temperatures_are_not_remembered_for_ever(pipeline, is_service):
    temperatures = np.linspace(0.5, 1.5, 2 * MOST_ESTIMATORS).tolist()
    asked = Service(pipeline) if is_service else pipeline
    for temperature in temperatures:
        asked.generate("x", temperature=temperature, **OPTIONS)
        asked.generate("x", temperature=temperatures[0], **OPTIONS)  # always of the latest used
    kept = [setting[-3] for setting in pipeline.models.estimators.keys]
    assert kept == [*temperatures[1 - MOST_ESTIMATORS :], temperatures[0]]
    asked.close()
    pipeline.close()


def test_requests_of_one_setting_learn_together(pipeline):
    for _ in range(3):
        pipeline.generate("x", **{**OPTIONS, "max_new_tokens": 8})
    (setting,) = pipeline.models.estimators.keys
    estimator = pipeline.models.estimators.of(setting, AcceptanceEstimator)
    assert estimator.loop.num_plain + estimator.loop.num_drafted > 0
    pipeline.close()


def test_texts_are_kept_for_each_caller_and_not_for_too_many():
    texts: Recent[NGramPool] = Recent(MOST_CALLERS)
    new = partial(NGramPool, 100)
    first = texts.of("a", new)
    assert texts.of("a", new) is first
    assert texts.of("b", new) is not first
    for number in range(MOST_CALLERS):
        texts.of(str(number), new)
    assert texts.of("a", new) is not first


def test_texts_of_earlier_requests_are_drafted_from(demo_bundle):
    """The same request again is in the pool; that of another caller, and without a pool, is not."""
    options = {"strategy": "speculative", "drafter": "ngram", "seed": 3, "max_new_tokens": 48}
    options["draft_length"] = 4  # whatever this machine thinks of the costs
    iterations = {}
    for size in (0, 4096):
        with Pipeline.from_bundle(demo_bundle, num_threads=1, ngram_pool=size) as pipeline:
            results = [pipeline.generate("def add(", **options) for _ in range(2)]
            tokens = [result.sequences[0].token_ids for result in results]
            assert tokens[0] == tokens[1]
            iterations[size] = [result.stats.num_iterations for result in results]
            assert (
                pipeline.prepare("x", options, caller="other").ngram_pool
                is not (pipeline.prepare("x", options).ngram_pool)
                or not size
            )
            assert (pipeline.prepare("x", options).ngram_pool is None) == (size == 0)
            assert pipeline.prepare("x", {"drafter": "model"}).ngram_pool is None
    assert iterations[0][1] >= 0.8 * iterations[0][0]
    assert iterations[4096][1] < 0.6 * iterations[4096][0]
