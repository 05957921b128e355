"""Head of a draft: a few logits at a time, and of some tokens only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_distill.loss import DraftHead
from dsbd_distill.teacher import TorchDevice

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
