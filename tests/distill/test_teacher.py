"""The target as a teacher: its labels and samples, and how few logits exist at a time."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dsbd_distill import acceptance as pool_module
from dsbd_distill import teacher as module
from dsbd_distill.acceptance import STEPS_A_ROUND, Pool
from dsbd_distill.draft_kind import LayerDrafts
from dsbd_distill.lesson import NUM_TOP, Lesson, joined
from dsbd_distill.teacher import (
    CHAT_SAMPLING,
    Sampling,
    Teacher,
    TeacherFeatures,
    TorchDevice,
    best_device,
    num_labels,
)
from dsbd_export.chats import Prompts
from dsbd_export.checkpoints.model_loading import load_model
from tests.decoding.exact_laws import chi_square_p_value
from tests.distill.conftest import drafts_of, opened

EXACT = TorchDevice("cpu", uses_bf16=False)
TOP_3, TOP_4 = (Sampling(temperature=1.0, top_k=k) for k in (3, 4))


@pytest.fixture(scope="module")
def model(target):
    return load_model(opened(target))


@pytest.fixture
def teacher(model):
    return Teacher(model, 300, 64, EXACT)


def probs_of(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor(tokens), use_cache=False).logits.softmax(-1).numpy()


def test_labels_are_the_most_probable_tokens(model, teacher):
    tokens = np.random.default_rng(0).integers(2, 300, (5, 12))
    rows = teacher.label(tokens, 7)
    expected = np.sort(probs_of(model, tokens)[:, -7:], axis=-1)[..., : -NUM_TOP - 1 : -1]
    np.testing.assert_allclose(np.exp(rows.log_probs), expected, rtol=1e-4)
    picked = np.take_along_axis(probs_of(model, tokens)[:, -7:], rows.ids.astype(np.int64), -1)
    np.testing.assert_allclose(picked, expected, rtol=1e-4)
    assert rows.tokens.tolist() == tokens.tolist()


def test_products_in_bf16_are_near_and_leave_the_model_as_it_was(model, teacher):
    tokens = np.random.default_rng(0).integers(2, 300, (5, 12))
    rounded = dataclasses.replace(teacher, device=TorchDevice("cpu", uses_bf16=True))
    before, narrow, after = (each.label(tokens, 7) for each in (teacher, rounded, teacher))
    np.testing.assert_array_equal(after.log_probs, before.log_probs)
    difference = np.abs(narrow.log_probs[..., 0] - before.log_probs[..., 0])
    assert 0 < difference.max() < 0.05
    layer = next(each for each in model.modules() if isinstance(each, nn.Linear))
    with rounded.device.narrow_products(model):
        product = layer(torch.ones(1, layer.in_features))
        exact = nn.functional.linear(
            torch.ones(1, layer.in_features), layer.weight.bfloat16().float()
        )
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, exact, rtol=0.01, atol=0.01)


def test_samples_carry_the_labels_of_the_tokens_before_them(teacher):
    prompts = np.random.default_rng(1).integers(2, 300, (4, 6))
    tokens, rows = teacher.sample(prompts, 16, TOP_3, seed=5)
    assert tokens.shape == (4, 16) and (tokens[:, :6] == prompts).all()
    assert rows.tokens.tolist() == tokens[:, :-1].tolist() and rows.ids.shape == (4, 10, NUM_TOP)
    expected = teacher.label(tokens[:, :-1], 10)
    np.testing.assert_allclose(rows.log_probs, expected.log_probs, atol=1e-4)
    drawn = tokens[:, 6:, None]
    assert (rows.ids[..., :3] == drawn).any(-1).all()  # each of its own top three


def test_samples_follow_the_distribution_after_top_k(model, teacher):
    prompt, num_draws = [[5, 9]], 3000
    tokens, _ = teacher.sample(np.repeat(prompt, num_draws, axis=0), 3, TOP_4, seed=0)
    probs = probs_of(model, prompt)[0, -1]
    best = np.argsort(probs)[::-1][:4]
    law = {int(token): float(probs[token] / probs[best].sum()) for token in best}
    counts = Counter(tokens[:, -1].tolist())
    assert set(counts) <= set(law)
    assert chi_square_p_value(counts, law, num_draws) > 1e-4


PROMPTS = [np.arange(2, 2 + length) for length in (9, 4, 7, 4, 80)]
END = 1


def answers_of(teacher, ends=(END,), seed=3):
    return teacher.answer(PROMPTS, 6, CHAT_SAMPLING, ends, seed)


def test_answers_begin_after_prompts_of_any_length(teacher, model):
    found = answers_of(teacher, ends=())
    length = 80 + 6 - 1
    assert found.tokens.shape == (5, length)
    begin = length - found.counted.shape[1]
    for row, prompt in enumerate(PROMPTS):
        assert found.tokens[row, : len(prompt)].tolist() == prompt.tolist()
        places = begin + np.flatnonzero(found.counted[row])
        assert places.tolist() == list(range(len(prompt) - 1, len(prompt) + 5))
        alone = teacher.label(found.tokens[row : row + 1, : places[-1] + 1].astype(np.int64), 6)
        found_here = found.log_probs[row, found.counted[row]]
        np.testing.assert_allclose(found_here, alone.log_probs[0], atol=1e-4)
        drawn = found.tokens[row, len(prompt) : len(prompt) + 5]
        ids = found.ids[row, found.counted[row]][:-1]
        probs = CHAT_SAMPLING.probs(torch.from_numpy(found_here)[:-1]).numpy()
        assert (probs[ids == drawn[:, None]] > 0).all() and (ids == drawn[:, None]).any(-1).all()


def test_a_cache_written_in_place_gives_the_same_bits(teacher, monkeypatch):
    monkeypatch.setattr(module, "_ROOM", 2)  # 6 tokens after a prompt: it grows twice
    grown, pad = [], module.F.pad
    monkeypatch.setattr(module.F, "pad", lambda *args: grown.append(args) or pad(*args))
    found = answers_of(teacher)
    assert grown
    monkeypatch.setattr(module, "in_place", lambda cache: cache)
    copied = answers_of(teacher)
    np.testing.assert_array_equal(found.tokens, copied.tokens)
    np.testing.assert_array_equal(found.log_probs, copied.log_probs)


def test_answers_end_where_the_target_ends_them(teacher):
    """Every token that is ever drawn ends an answer: each has one."""
    found = answers_of(teacher, ends=range(300))
    assert found.counted.sum(1).tolist() == [1] * 5
    longer = answers_of(teacher, ends=())
    ends = longer.tokens[0, 9:11]  # the second token of the first answer ends it
    cut = answers_of(teacher, ends=ends[1:])
    assert cut.counted[0].sum() == 2 if ends[0] != ends[1] else 1


def test_a_batch_has_only_what_is_learned(teacher):
    found = answers_of(teacher, ends=())
    tokens, ids, log_probs, counted = found.batch(np.array([1, 3]), EXACT.name)
    assert tokens.shape == (2, 4 + 6 - 1) and counted.all()
    assert ids.shape == log_probs.shape == (2, 6, NUM_TOP)
    both = joined([found, found])
    assert both.tokens.tolist() == [*found.tokens.tolist()] * 2


def test_rows_in_more_room():
    ones = (np.ones((1, 2, 1), np.uint32), np.ones((1, 2, 1), np.float32), np.ones((1, 2), bool))
    part = Lesson(np.arange(1, 6, dtype=np.uint32)[None], *ones)
    wide = part.within(7, 5)
    assert wide.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0]]
    assert wide.counted.tolist() == [[False, True, True, False, False]]
    assert wide.ids[..., 0].tolist() == [[0, 1, 1, 0, 0]]


def test_temperature_then_top_k_then_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    cut = Sampling(temperature=1.0, top_k=3, top_p=0.7).probs(logits)  # 4/9, 3/9 | 2/9
    torch.testing.assert_close(cut, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))
    sharp = Sampling(temperature=0.5, top_k=4).probs(logits)
    torch.testing.assert_close(sharp, torch.tensor([16.0, 9.0, 4.0, 1.0]) / 30)
    best = Sampling(temperature=1.0, top_k=4, top_p=1e-6).probs(logits)
    assert best.tolist() == [1.0, 0.0, 0.0, 0.0]


class LargeVocabulary(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.vocab_size = vocab_size
        self.most = 0

    def forward(self, input_ids, use_cache, logits_to_keep, past_key_values=None):
        shape = (len(input_ids), min(logits_to_keep, input_ids.shape[1]), self.vocab_size)
        self.most = max(self.most, torch.Size(shape).numel())
        logits = (torch.zeros(1, 1, self.vocab_size) + self.weight).expand(shape)
        return SimpleNamespace(logits=logits, past_key_values=None)


def test_logits_are_never_there_for_more_than_a_few_rows(tmp_path, monkeypatch):
    """A step of a training, its round made for it, at a vocabulary of 50,000."""
    monkeypatch.setattr(module, "_MOST_LOGITS", 2**20)
    monkeypatch.setattr(module, "_FEW_LOGITS", 2**19)
    target, draft = LargeVocabulary(50_000), LargeVocabulary(50_000)
    texts = np.arange(4000, dtype=np.uint32)
    teacher = Teacher(target, 50_000, 64, EXACT)
    pool = Pool(folder=tmp_path, texts=texts, teacher=teacher, context_length=24, seed=0)
    batches = pool.batches(0)
    drafts = drafts_of(LayerDrafts, SimpleNamespace(vocab_size=50_000))
    for batch in batches:
        drafts.loss(draft, (*batch, torch.tensor(0.5))).backward()
    labels = sum(ids.shape[0] * ids.shape[1] for _, ids, *_ in batches)
    assert labels * 50_000 > 8 * 2**20  # of a step alone: they are not there at once
    assert 0 < target.most <= 2**20 and 0 < draft.most <= 2**20


def test_of_long_rows_as_many_labels_as_fit():
    assert num_labels(256, 4096) == 256
    assert num_labels(2048, 151_936) == 2**26 // 151_936 == 441
    assert num_labels(16, 2**30) == 1


def test_rounds_follow_from_seed_and_number(tmp_path, teacher):
    texts = np.random.default_rng(0).integers(2, 300, 3000).astype(np.uint32)

    def pool(name, seed=7):
        folder = tmp_path / name
        return Pool(folder=folder, texts=texts, teacher=teacher, context_length=32, seed=seed)

    steps = (0, 7, STEPS_A_ROUND, 3 * STEPS_A_ROUND + 5)
    first = pool("first")
    before = [first.batches(step) for step in steps]
    again, other = pool("again"), pool("other", seed=8)
    for step, batches in zip(reversed(steps), reversed(before), strict=True):
        assert same(again.batches(step), batches)
        assert same(first.batches(step), batches)
        assert not same(other.batches(step), batches)


def same(batches, others):
    pairs = zip(batches, others, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def test_old_rounds_go_and_come_back(tmp_path, teacher):
    texts = np.random.default_rng(0).integers(2, 300, 3000).astype(np.uint32)
    pool = Pool(folder=tmp_path, texts=texts, teacher=teacher, context_length=16, seed=0)
    first = pool.batches(0)
    for file in tmp_path.glob("000000*.npz"):  # as if of an older training
        file.rename(file.with_name(file.name.replace("000000", "000003")))
    pool.batches(35 * STEPS_A_ROUND)
    left = {int(file.stem[:6]) for file in tmp_path.glob("*.npz")}
    assert min(left) > 35 - 32 and len(left) <= 2
    assert same(pool.batches(0), first)


def test_answers_of_a_step_and_steps_of_a_round(tmp_path, teacher):
    prompts = Prompts(np.arange(2, 42, dtype=np.uint32), np.arange(4, 41, 4))
    given = {"texts": np.zeros(0, np.uint32), "prompts": prompts, "teacher": teacher}
    rounds = {"num_answers": 6, "answers_a_step": 2, "steps_a_round": 5}
    pool = Pool(folder=tmp_path, **given, **rounds, context_length=16, seed=0)
    assert [len(tokens) for step in range(5) for tokens, *_ in pool.batches(step)] == [2] * 5
    assert [file.stem for file in tmp_path.iterdir()] == ["000000_answers"]
    pool.batches(5)
    assert {file.stem[:6] for file in tmp_path.iterdir()} == {"000000", "000001"}


@pytest.fixture
def features_teacher(model):
    return Teacher(model, 300, 64, EXACT, TeacherFeatures(model, (0, 1), 32))


def features_of(model, tokens):
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64))
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    return torch.cat(hidden[:2], dim=-1).bfloat16()


def test_features_are_kept_of_all_tokens_but_the_last(features_teacher, model):
    """Of labels, samples and answers of any length, those of a plain pass over the row alone."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 300, (5, 12))
    found = {
        "labels": features_teacher.label(tokens, 7),
        "samples": features_teacher.sample(tokens[:, :5], 10, TOP_3, seed=1)[1],
        "answers": answers_of(features_teacher, ends=range(150)),
    }
    for name, rows in found.items():
        begin = rows.tokens.shape[1] - rows.counted.shape[1]
        for row, features in enumerate(rows.features):
            last = begin + np.flatnonzero(rows.counted[row])[-1]
            assert features.shape == (last, 64), name
            wanted = features_of(model, rows.tokens[row : row + 1, :last])[0].float()
            bits = torch.from_numpy(features.copy()).view(torch.bfloat16).float()
            torch.testing.assert_close(bits, wanted, atol=1e-4, rtol=2**-7)
    batch = found["answers"].batch(np.array([0, 1]), "cpu")
    length = batch[0].shape[1]
    longer, shorter = (found["answers"].features[row] for row in (0, 1))
    assert len(batch) == 5 and batch[4].shape == (2, length - 1, 64)
    assert not batch[4][1, len(shorter) :].any() and batch[4][1, : len(shorter)].any(-1).all()
    assert batch[4][0, 0].bfloat16().view(torch.int16).tolist() == longer[0].tolist()


def test_rounds_with_wide_features_are_few(tmp_path, features_teacher, teacher, monkeypatch):
    texts = np.random.default_rng(0).integers(2, 300, 3000).astype(np.uint32)

    def pool(of, name):
        return Pool(folder=tmp_path / name, texts=texts, teacher=of, context_length=16, seed=0)

    few, many = pool(features_teacher, "few"), pool(teacher, "many")
    assert many.num_rounds == few.num_rounds == 32
    a_round = 16 * (64 + 128 + 4) * 64 * 2
    monkeypatch.setattr(pool_module, "_MOST_FEATURE_BYTES", 3 * a_round)
    assert (many.num_rounds, few.num_rounds) == (32, 3)
    monkeypatch.setattr(pool_module, "_MOST_FEATURE_BYTES", 1)
    assert few.num_rounds == 1
    monkeypatch.setattr(pool_module, "_MOST_FEATURE_BYTES", 3 * a_round)
    first = few.batches(0)
    assert [batch[4].shape[2] for batch in first] == [64] * len(first)
    for file in tmp_path.glob("few/*.npy"):
        file.unlink()
    assert same(few.batches(0), first)
    few.batches(5 * STEPS_A_ROUND)
    left = {int(file.stem[:6]) for file in tmp_path.glob("few/*.np[yz]")}
    assert 5 in left and min(left) > 5 - 3
    assert sum(file.stat().st_size for file in tmp_path.glob("few/*.npy")) < 3 * a_round
    assert same(few.batches(0), first)


def test_the_device():
    device = best_device()
    assert device.name == ("cuda" if torch.cuda.is_available() else "cpu")
    assert EXACT.rows_at_once(256, 4096) == 8 and EXACT.rows_at_once(256, 10**6) == 1
    assert TorchDevice("cuda", True).rows_at_once(256, 4096) == 64
