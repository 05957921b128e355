"""The loss and the acceptance of a draft, on distributions written down."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dsbd_export.distill import loss
from dsbd_export.distill.acceptance import (
    HeldOutPrompts,
    HeldOutSamples,
    acceptance_rate,
    warped,
)
from dsbd_export.distill.loss import distillation_loss, log_probs_of, tv_weight
from dsbd_export.distill.teacher import Labelled, TorchDevice

EXACT = TorchDevice("cpu", uses_bf16=False)
P = [0.5, 0.3, 0.1, 0.1]  # the target; its top two tokens are kept
Q = [0.25, 0.25, 0.4, 0.1]  # the draft
TOP_IDS, REST_P, REST_Q = [0, 1], 0.2, 0.5


class FixedModel(nn.Module):
    """The same distribution behind every token."""

    def __init__(self, probs):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probs).log())
        self.config = SimpleNamespace(vocab_size=len(probs))

    def forward(self, input_ids, use_cache, logits_to_keep):
        assert not use_cache
        rows = self.logits.expand(len(input_ids), logits_to_keep, -1)
        return SimpleNamespace(logits=rows)


def loss_at(weight, probs=Q):
    ids = torch.tensor(TOP_IDS).expand(3, 5, 2)
    log_p = torch.tensor([P[i] for i in TOP_IDS]).log().expand(3, 5, 2)
    batch = (torch.zeros(3, 8, dtype=torch.int64), ids, log_p, torch.tensor(weight))
    return distillation_loss(FixedModel(probs), batch, EXACT)


def test_the_two_distances():
    kl = 0.5 * np.log(0.5 / 0.25) + 0.3 * np.log(0.3 / 0.25) + REST_P * np.log(REST_P / REST_Q)
    tv = 0.5 * (0.25 + 0.05 + 0.3)
    assert loss_at(0.0).item() == pytest.approx(kl, rel=1e-5)
    assert loss_at(1.0).item() == pytest.approx(tv, rel=1e-5)
    assert loss_at(0.25).item() == pytest.approx(0.75 * kl + 0.25 * tv, rel=1e-5)


def test_log_probs_and_their_gradient_are_those_of_a_softmax(monkeypatch):
    monkeypatch.setattr(loss, "_CACHED_LOGITS", 21)  # three rows at a time
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(2, 5, 7, generator=generator).argsort(-1)[..., :3]
    found, wanted = log_probs_of(logits, ids), logits.log_softmax(-1).gather(-1, ids)
    weights = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((each.exp() * weights).sum(), logits)[0] for each in (found, wanted)
    ]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*gradients)


def test_a_draft_that_agrees_has_no_loss():
    same_but_for_the_rest = [0.5, 0.3, 0.05, 0.15]
    for weight in (0.0, 1.0):
        assert loss_at(weight, same_but_for_the_rest).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("progress", "weight"), [(0.0, 0.0), (0.3, 0.0), (0.45, 0.45), (0.6, 0.9), (1.0, 0.9)]
)
def test_total_variation_rises(progress, weight):
    assert tv_weight(progress) == pytest.approx(weight)


def samples_of(probs, num_prompts=6, num_new=3, top_k=4):
    order = np.argsort(probs)[::-1][:top_k]
    kept = np.array(probs)[order] / np.array(probs)[order].sum()
    shape = (num_prompts, num_new, top_k)
    return HeldOutSamples(
        np.zeros((num_prompts, 5), dtype=np.int64),
        np.broadcast_to(order, shape).astype(np.int64),
        np.broadcast_to(kept, shape).astype(np.float32),
    )


def test_acceptance_is_the_overlap():
    mean, error = acceptance_rate(FixedModel(Q), samples_of(P), EXACT)
    assert mean == pytest.approx(np.minimum(P, Q).sum()) == pytest.approx(0.7)
    assert error == pytest.approx(0.0, abs=1e-6)
    assert acceptance_rate(FixedModel(P), samples_of(P), EXACT)[0] == pytest.approx(1.0)


def test_acceptance_is_of_both_after_top_k():
    """Top two: target {0: 5/8, 1: 3/8}, draft {2: 0.4, one of 0 and 1 of equal logits}."""
    probs = [0.25, 0.2, 0.4, 0.15]
    mean, _ = acceptance_rate(FixedModel(probs), samples_of(P, top_k=2), EXACT)
    assert mean == pytest.approx(0.25 / 0.65)


def test_the_draft_is_back_in_training_mode():
    model = FixedModel(Q).train()
    acceptance_rate(model, samples_of(P), EXACT)
    assert model.training


def test_warped():
    found = warped(torch.tensor([0.1, 0.4, 0.2, 0.3]).log(), top_k=2)
    torch.testing.assert_close(found, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]))


class CountedTeacher:
    """Teaches nothing; counts its calls, and may be interrupted at one of them."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.num_calls, self._interrupted_at = 0, interrupted_at

    def sample(self, prompts, length, top_k, seed):
        self.num_calls += 1
        if self.num_calls == self._interrupted_at:
            raise KeyboardInterrupt
        num_rows, num_new = len(prompts), length - prompts.shape[1]
        tokens = np.random.default_rng(seed).integers(0, 9, (num_rows, length - 1))
        tokens[:, : prompts.shape[1]] = prompts
        shape = (num_rows, num_new, top_k)
        ids, log_probs = np.zeros(shape, np.uint32), np.zeros(shape, np.float32)
        return tokens, Labelled(tokens.astype(np.uint32), ids, log_probs)


def test_held_out_samples_are_drawn_when_needed_and_kept(tmp_path):
    prompts = np.arange(150 * 4).reshape(150, 4) % 9
    lines = []

    def held_out(teacher, folder):
        return HeldOutPrompts(prompts, tmp_path / folder, teacher, seed=5, report=lines.append)

    undisturbed = held_out(CountedTeacher(), "undisturbed").samples()
    first = CountedTeacher(interrupted_at=3)
    assert len(held_out(first, "kept").samples(64).tokens) == 64 and first.num_calls == 1
    with pytest.raises(KeyboardInterrupt):
        held_out(first, "kept").samples()
    second = CountedTeacher()
    found = held_out(second, "kept").samples()
    assert second.num_calls == 1  # the third part
    assert found.tokens.tolist() == undisturbed.tokens.tolist()
    assert found.tokens.shape == (150, 7) and np.array_equal(found.tokens[:, :4], prompts)
    assert held_out(None, "kept").samples(100).tokens.tolist() == found.tokens[:100].tolist()
    assert len(lines) == 4  # one whenever something is drawn


def test_prompts_and_parts_of_held_out_samples(tmp_path):
    samples = HeldOutSamples(
        np.arange(40).reshape(4, 10), np.zeros((4, 7, 2), np.int64), np.ones((4, 7, 2), np.float32)
    )
    assert samples.prompts.tolist()[0] == [0, 1, 2, 3]  # 4 + 7 - 1 tokens
    samples.write(tmp_path / "samples.npz")
    read = HeldOutSamples.read(tmp_path / "samples.npz").first(2)
    assert [len(array) for array in (read.tokens, read.ids, read.probs)] == [2, 2, 2]
