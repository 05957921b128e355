"""The gain of a draft and the advice that follows: on made-up figures, and on the demo pair."""

import dataclasses

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.advice import (
    NUM_STEPS,
    Advice,
    Gain,
    advise,
    greedy_gain,
    measured_costs,
    sentences,
)
from dsbd_ort.benchmark.bench_run import PROMPTS, BenchmarkError
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from tests.runtime.bundle_edits import without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

COSTS = EngineCosts(CostCurve((1, 16), (0.05, 0.15)), CostCurve((1, 16), (0.02, 0.04)))
GAINS = (Gain("greedy", 1, 1.5, 1.4, 3.0), Gain("dsbd", 4, 1.0, 1.0, 1.1))
FOUND = Advice(COSTS, agreement=0.8, gains=GAINS, greedy_at_half=2.0, greedy_by_ngrams=1.8)


def test_sentences_name_the_price_what_would_lower_it_and_what_gains_nothing() -> None:
    price, cheaper, ngrams, beams, best = sentences(FOUND, is_cheapest=False)
    assert "80%" in price and "0.40 of a call of the target" in price
    assert "2.00 instead of 1.50" in cheaper and "--draft-quantize auto" in cheaper
    assert "1.80 instead of 1.50" in ngrams and ngrams.endswith("--drafter model+ngram")
    assert "4 beams gains nothing" in beams and "16 rows" in beams and "2.1 times" in beams
    assert best == "It pays most for greedy: 1.50."


def test_nothing_is_recommended_that_gains_nothing() -> None:
    assert len(sentences(FOUND, is_cheapest=True)) == 4
    same = dataclasses.replace(FOUND, greedy_at_half=1.51, greedy_by_ngrams=1.49)
    assert len(sentences(same, is_cheapest=False)) == 3
    useless = dataclasses.replace(FOUND, gains=(*GAINS[1:], Gain("greedy", 1, 1.0, 1.0, 1.0)))
    assert sentences(useless, is_cheapest=True)[-1].startswith("No strategy gains")


def test_the_demo_pair_is_judged_by_its_own_costs(demo_bundle) -> None:
    steps = []
    with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipeline:
        learned = pipeline.models.costs
        found = advise(pipeline, PROMPTS[:2], lambda: steps.append(None))
        assert pipeline.models.costs is learned
    assert len(steps) == NUM_STEPS
    assert 0.3 < found.agreement <= 1.0
    assert [(gain.strategy, gain.num_beams) for gain in found.gains] == [
        ("greedy", 1), ("sample", 1), ("dsbd", 2), ("dsbd", 4), ("beam search", 4),
    ]  # fmt: skip
    for gain in found.gains:
        # An iteration costs a target call, so that no gain is larger than its tokens.
        assert 0.8 < gain.expected <= gain.tokens_per_iteration + 1e-9
    assert found.greedy_at_half > found.gains[0].expected - 0.15
    assert found.greedy_by_ngrams > 0.8


def test_the_gain_is_found_after_prompts_that_the_draft_has_to_read(demo_bundle) -> None:
    # Like those of Qwen2.5-Coder 1.5B and 0.5B: 48 tokens would not pay for reading 250.
    costs = EngineCosts(CostCurve((1, 16), (0.045, 0.09)), CostCurve((1, 16), (0.0096, 0.05)))
    with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipeline:
        ids = pipeline.tokenizer.encode("\n\n".join(PROMPTS) * 4)[:250]
        assert greedy_gain(pipeline, [pipeline.tokenizer.decode(ids)], costs) > 1.1


def test_ngrams_are_recommended_where_the_prompt_is_copied(demo_bundle) -> None:
    costs = EngineCosts(CostCurve((1, 16), (0.05, 0.06)), CostCurve((1, 16), (0.04, 0.05)))
    body = "".join(f"    self.field_{i} = field_{i}\n" for i in range(12))
    with Pipeline.from_bundle(demo_bundle, num_threads=1, ngram_pool=0) as pipeline:
        by_model = greedy_gain(pipeline, [body], costs)
        by_ngrams = greedy_gain(pipeline, [body], costs, drafter="model+ngram")
    assert by_ngrams > 1.2 * by_model


def test_a_bundle_without_a_draft_is_refused(tmp_path) -> None:
    write_tiny_bundle(tmp_path)
    without_draft(tmp_path, TinyModel())
    with (
        Pipeline.from_bundle(tmp_path) as pipeline,
        pytest.raises(BenchmarkError, match="has no draft that could be judged"),
    ):
        measured_costs(pipeline)
