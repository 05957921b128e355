"""The loss and the acceptance of a draft, and its head, on distributions written down."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from dsbd_distill import loss
from dsbd_distill.acceptance import Best, HeldOutPrompts
from dsbd_distill.draft_kind import LayerDrafts
from dsbd_distill.lesson import Lesson
from dsbd_distill.loss import (
    Coverage,
    DraftHead,
    distance,
    log_probs_of,
    tv_weight,
)
from dsbd_distill.teacher import TEXT_SAMPLING, Sampling, TorchDevice
from tests.distill.conftest import drafts_of

EXACT = TorchDevice("cpu", uses_bf16=False)
P = [0.5, 0.3, 0.1, 0.1]  # the target; its top two tokens are kept
Q = [0.25, 0.25, 0.4, 0.1]  # the draft
TOP_IDS, REST_P, REST_Q = [0, 1], 0.2, 0.5


class FixedModel(nn.Module):
    def __init__(self, probs):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probs).log())
        self.config = LlamaConfig(vocab_size=len(probs))

    def forward(self, input_ids, use_cache, logits_to_keep):
        assert not use_cache
        rows = self.logits.expand(len(input_ids), logits_to_keep, -1)
        return SimpleNamespace(logits=rows)


def drafts_like(model, sampling=TEXT_SAMPLING):
    checkpoint = SimpleNamespace(vocab_size=model.config.vocab_size)
    return drafts_of(LayerDrafts, checkpoint, sampling=sampling)


def loss_of(model, batch):
    return drafts_like(model).loss(model, batch)


def acceptance_of(model, samples, sampling=TEXT_SAMPLING):
    return drafts_like(model, sampling).acceptance(model, [samples])


def loss_at(weight, probs=Q):
    ids = torch.tensor(TOP_IDS).expand(3, 5, 2)
    log_p = torch.tensor([P[i] for i in TOP_IDS]).log().expand(3, 5, 2)
    counted = torch.ones(3, 5, dtype=torch.bool)
    batch = (torch.zeros(3, 8, dtype=torch.int64), ids, log_p, counted, torch.tensor(weight))
    return loss_of(FixedModel(probs), batch)


def test_the_two_distances():
    kl = 0.5 * np.log(0.5 / 0.25) + 0.3 * np.log(0.3 / 0.25) + REST_P * np.log(REST_P / REST_Q)
    tv = 0.5 * (0.25 + 0.05 + 0.3)
    assert loss_at(0.0).item() == pytest.approx(kl, rel=1e-5)
    assert loss_at(1.0).item() == pytest.approx(tv, rel=1e-5)
    assert loss_at(0.25).item() == pytest.approx(0.75 * kl + 0.25 * tv, rel=1e-5)
    same_except_for_the_rest = [0.5, 0.3, 0.05, 0.15]
    for weight in (0.0, 1.0):
        assert loss_at(weight, same_except_for_the_rest).item() == pytest.approx(0.0, abs=1e-6)


def test_a_coverage_counts_each_of_the_best_alike():
    """0.5 and 0.3 of the target, 0.25 and 0.25 of the draft: log 2 and log 1.2 are missing."""
    log_p, log_q = (torch.tensor([[p[i] for i in TOP_IDS]]).log() for p in (P, Q))
    zero = torch.tensor(0.0)
    found = distance(log_q, log_p, zero, Coverage(2)).item()
    missing = (np.log(2.0) + np.log(1.2)) / 2
    kl = distance(log_q, log_p, zero).item()
    assert found == pytest.approx(0.7 * kl + 0.3 * missing, rel=1e-5)
    first = distance(log_q, log_p, zero, Coverage(1)).item()
    assert first == pytest.approx(0.7 * kl + 0.3 * np.log(2.0), rel=1e-5)
    assert distance(log_p, log_p, zero, Coverage(2)).item() == pytest.approx(0.0, abs=1e-6)
    more = torch.tensor([[0.6, 0.35]]).log()  # what is proposed too much covers as well
    covered, without = (distance(more, log_p, zero, c).item() for c in (Coverage(2), None))
    assert covered == pytest.approx(0.7 * without, rel=1e-5)


def test_positions_that_do_not_count_change_nothing():
    ids = torch.tensor(TOP_IDS).expand(1, 3, 2)
    log_p = torch.tensor([[[0.5, 0.3], [0.9, 0.05], [0.5, 0.3]]]).log()
    counted = torch.tensor([[True, False, True]])
    batch = (torch.zeros(1, 4, dtype=torch.int64), ids, log_p, counted, torch.tensor(0.0))
    found = loss_of(FixedModel(Q), batch)
    assert found.item() == pytest.approx(loss_at(0.0).item(), rel=1e-6)


def test_greedy_agreement_and_coverage():
    best = samples_of(P, top_k=4)  # 0, 1, then 2 and 3
    found = acceptance_of(FixedModel(Q), best)
    assert (found.greedy, found.covered) == pytest.approx((0.0, 1.0))  # of 4 tokens all are covered
    same = acceptance_of(FixedModel(P), best)
    assert same.greedy == pytest.approx(1.0)


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


def test_total_variation_rises():
    weights = [tv_weight(progress) for progress in (0.0, 0.3, 0.45, 0.6, 1.0)]
    assert weights == pytest.approx([0.0, 0.0, 0.45, 0.9, 0.9])


def samples_of(probs, num_prompts=6, num_new=3, top_k=4):
    order = np.argsort(probs)[::-1][:top_k]
    kept = np.array(probs)[order] / np.array(probs)[order].sum()
    shape = (num_prompts, num_new, top_k)
    return Lesson(
        np.zeros((num_prompts, 5), dtype=np.uint32),
        np.broadcast_to(order, shape).astype(np.uint32),
        np.broadcast_to(np.log(kept), shape).astype(np.float32),
        np.ones(shape[:2], bool),
    )


def acceptance_rate(draft, samples):
    top_k = Sampling(temperature=1.0, top_k=samples.ids.shape[-1])
    found = acceptance_of(draft, samples, top_k)
    return found.rate, found.error


def test_acceptance_is_the_overlap():
    mean, error = acceptance_rate(model := FixedModel(Q).train(), samples_of(P))
    assert model.training  # again
    assert mean == pytest.approx(np.minimum(P, Q).sum()) == pytest.approx(0.7)
    assert error == pytest.approx(0.0, abs=1e-6)
    assert acceptance_rate(FixedModel(P), samples_of(P))[0] == pytest.approx(1.0)


def test_acceptance_is_of_both_after_top_k():
    """Top two: target {0: 5/8, 1: 3/8}, draft {2: 0.4, one of 0 and 1 of equal logits}."""
    probs = [0.25, 0.2, 0.4, 0.15]
    mean, _ = acceptance_rate(FixedModel(probs), samples_of(P, top_k=2))
    assert mean == pytest.approx(0.25 / 0.65)


def test_a_draft_draws_from_its_best():
    best = Best.of(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log(), torch.tensor([5, 6, 7, 8]))
    assert best.ids.tolist() == [[6, 8, 7, 5]]
    found = best.probs_of(torch.tensor([[5, 8, 3, 6]]), Sampling(temperature=1.0, top_k=2))
    torch.testing.assert_close(found, torch.tensor([[0.0, 3 / 7, 0.0, 4 / 7]]))


class CountedTeacher:
    """Teaches nothing; counts its calls, and may be interrupted at one of them."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.num_calls, self._interrupted_at, self.features = 0, interrupted_at, None

    def answer(self, prompts, num_new, sampling, ends, seed):
        self.num_calls += 1
        if self.num_calls == self._interrupted_at:
            raise KeyboardInterrupt
        num_rows, length = len(prompts), prompts.shape[1]
        tokens = np.random.default_rng(seed).integers(0, 9, (num_rows, length + num_new - 1))
        tokens[:, :length] = prompts
        shape = (num_rows, num_new, 32)
        ids, log_probs = np.zeros(shape, np.uint32), np.zeros(shape, np.float32)
        return Lesson(tokens.astype(np.uint32), ids, log_probs, np.ones(shape[:2], bool))


def test_held_out_samples_are_drawn_when_needed_and_kept(tmp_path):
    prompts = np.arange(150 * 4).reshape(150, 4) % 9
    lines = []

    def held_out(teacher, folder):
        drawn = {"sampling": TEXT_SAMPLING, "num_new": 4, "ends": (), "seed": 5}
        places = {"folder": tmp_path / folder, "teacher": teacher, "report": lines.append}
        return HeldOutPrompts(prompts=prompts, **drawn, **places)

    def tokens_of(parts):
        return np.concatenate([part.tokens for part in parts])

    undisturbed = held_out(CountedTeacher(), "undisturbed").samples()
    first = CountedTeacher(interrupted_at=3)
    assert len(tokens_of(held_out(first, "kept").samples(64))) == 64 and first.num_calls == 1
    with pytest.raises(KeyboardInterrupt):
        held_out(first, "kept").samples()
    second = CountedTeacher()
    found = tokens_of(held_out(second, "kept").samples())
    assert second.num_calls == 1  # the third part
    assert found.tolist() == tokens_of(undisturbed).tolist()
    assert found.shape == (150, 7) and np.array_equal(found[:, :4], prompts)
    assert tokens_of(held_out(second, "kept").samples(100)).tolist() == found[:100].tolist()
    assert len(lines) == 4  # one whenever something is drawn


VOCAB_SIZE = 11
PROPOSED = np.array([1, 2, 5, 6, 9])


class FewRows(TorchDevice):
    """A device that computes three places at a time, and counts how many logits there are."""

    def rows_at_once(self, num_labels: int, vocab_size: int) -> int:
        return 3


DEVICE = FewRows("cpu", uses_bf16=False)


@pytest.fixture
def arrays():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(VOCAB_SIZE, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(7, VOCAB_SIZE, generator=generator).argsort(-1)[:, :3]
    return hidden, table, ids


def test_log_probs_and_their_gradients_are_those_of_a_softmax(arrays):
    hidden, table, ids = arrays
    found = DraftHead(len(table), None, DEVICE).log_probs(hidden, table, ids)
    wanted = (hidden @ table.T).log_softmax(-1).gather(-1, ids)
    weights = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [
        torch.autograd.grad((each.exp() * weights).sum(), (hidden, table))
        for each in (found, wanted)
    ]
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_logits_are_there_for_some_places_only(arrays, monkeypatch):
    hidden, table, ids = arrays
    most = []
    product = torch.Tensor.__matmul__

    def counted(self, other):
        most.append(self.shape[0])
        return product(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    DraftHead(len(table), None, DEVICE).log_probs(hidden, table, ids).sum().backward()
    assert max(most[:3]) == 3 and len(most) == 3 + 3 * 3  # rows of three parts, then each thrice


def test_some_tokens_are_a_softmax_over_them(arrays):
    hidden, table, ids = arrays
    head = DraftHead(VOCAB_SIZE, PROPOSED, DEVICE)
    found = head.log_probs(hidden, table, ids)
    over = (hidden @ table[PROPOSED].T).log_softmax(-1)
    for place in range(7):
        for k, token in enumerate(ids[place].tolist()):
            of_token = np.flatnonzero(token == PROPOSED)
            wanted = over[place, of_token[0]].item() if len(of_token) else -30.0
            assert found[place, k].item() == pytest.approx(wanted, abs=1e-5)
    best = head.best(hidden, table)
    order = over.argsort(-1, descending=True)
    assert best.ids.tolist() == PROPOSED[order.numpy()].tolist()
    torch.testing.assert_close(best.logits.log_softmax(-1), over.float().gather(-1, order))


def test_what_cannot_be_proposed_is_left_out_of_account():
    """0.5 of token 1 and 0.3 of token 3, which is not proposed: 0.5 / 0.7 remains, of 0.7."""
    head = DraftHead(VOCAB_SIZE, PROPOSED, DEVICE)
    log_p, share = head.proposable(torch.tensor([[1, 3]]), torch.tensor([[0.5, 0.3]]).log())
    assert share.tolist() == pytest.approx([0.7])
    assert log_p.exp().tolist()[0] == pytest.approx([0.5 / 0.7, 0.0])
