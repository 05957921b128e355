"""An engine that returns NaN or infinity is named and ends the request; the next is as if alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from dsbd_forward.logits import TopLogits
from dsbd_ort import DsbdError, Pipeline
from dsbd_ort.decoding import DecodingConfig, ModelError, TableModel, decode
from dsbd_ort.decoding.warp import Warp
from tests.robustness.preempting import PreemptedPipeline
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle
from tests.runtime.tiny_tokenizer import tiny_tokenizer

POISON = "Z"
SHORT = {  # a width with which no beam draws the poisoned token by itself
    "num_beams": 2,
    "width_policy": "threshold",
    "draft_length": 2,
    "max_new_tokens": 6,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class PoisonedModel(TinyModel):
    """Its logits, keys and values are bad from the first ``POISON`` of a text on."""

    bad: float = np.nan

    def weights(self):
        weights = super().weights()
        weights["tokens"][tiny_tokenizer().encode(POISON).ids] = self.bad
        return weights


def poisoned_bundle(path, role, bad, logits="full"):
    models = {
        name: PoisonedModel(seed=seed, bad=bad, logits=logits)
        if name == role
        else TinyModel(seed=seed, logits=logits)
        for name, seed in (("target", 0), ("draft", 1))
    }
    return write_tiny_bundle(path, **models)


def assert_alike(found, wanted):
    """In fp32 with fused attention rows that are computed again differ in their last bits."""
    assert [s.token_ids for s in found] == [s.token_ids for s in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-5)


@pytest.mark.parametrize("logits", ["full", "topk:20"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("prompt", ["abZ", "Zab"])
def test_the_engine_is_named_and_the_pipeline_goes_on(tmp_path, role, bad, logits, prompt):
    bundle = poisoned_bundle(tmp_path / "bundle", role, bad, logits)
    with Pipeline.from_bundle(bundle) as lone:
        wanted = lone.generate("ab", top_k=20, **SHORT)
    with PreemptedPipeline.from_bundle(bundle) as pipe:
        for _ in range(2):
            with pytest.raises(ModelError, match=rf"call \d of the {role}: the model returned"):
                pipe.generate(prompt, top_k=20, **SHORT)
            with pytest.raises(DsbdError, match=f"of the {role}"):
                list(pipe.stream(prompt, top_k=20, **SHORT))
            assert_alike(pipe.generate("ab", top_k=20, **SHORT).sequences, wanted.sequences)


@pytest.mark.parametrize("strategy", ["dsbd", "beam-search", "greedy", "speculative", "mjsd"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_logit_deep_in_the_vocabulary_is_found(strategy, bad):
    def logits_of(path):
        logits = np.zeros(50, np.float32)
        logits[43] = bad if len(path) == 4 else 0.0
        return logits

    target, draft = TableModel(50, logits_of), TableModel(50, lambda path: np.zeros(50))
    config = DecodingConfig(strategy=strategy, max_new_tokens=8)
    with pytest.raises(ModelError, match=r"call \d of the target: .*NaN or infinite"):
        decode(target, draft, [1, 2], config, np.random.default_rng(0))


CANDIDATES = [  # (top_logits, logsumexp)
    ([np.nan, 1.0, 0.0], 3.0),
    ([2.0, np.nan, 0.0], 3.0),
    ([2.0, 1.0, np.nan], 3.0),
    ([2.0, np.inf, 0.0], 3.0),
    ([np.inf, 1.0, 0.0], np.inf),
    ([2.0, 1.0, 0.0], np.nan),
    ([-np.inf, -np.inf, -np.inf], 0.0),
]


@pytest.mark.parametrize(("top_logits", "logsumexp"), CANDIDATES)
def test_a_bad_number_among_candidates_is_found(top_logits, logsumexp):
    ids = np.array([[5, 6, 7]])
    arrays = np.array([top_logits], np.float32), np.array([logsumexp], np.float32)
    with pytest.raises(ModelError, match="the model returned"):
        Warp(1.0, 3, 1.0).distributions(TopLogits(ids, *arrays))
