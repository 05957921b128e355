"""The loop's border: prompts, drafts and models that it refuses, ends, determinism."""

import numpy as np
import pytest

from dsbd_forward.forward import ForwardResult
from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding import (
    STRATEGIES,
    DecodingConfig,
    DecodingError,
    ModelError,
    TableModel,
    decode,
)
from tests.decoding.tables import all_tokens, mixed_table, random_table, run

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 6
TARGET = random_table(3, VOCAB)
DRAFT = mixed_table(TARGET, random_table(4, VOCAB), 0.7)


def models(draft_vocab=VOCAB):
    return TableModel(VOCAB, TARGET), TableModel(draft_vocab, random_table(4, draft_vocab))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "no token"), ([1, 6], "token id 6; expected 0 to 5"), ([-1], "token id -1")],
)
def test_bad_prompts(prompt, words):
    with pytest.raises(DecodingError, match=words):
        decode(*models(), prompt, DecodingConfig(), np.random.default_rng(0))


def test_missing_unneeded_and_foreign_draft():
    target, draft = models()
    rng = np.random.default_rng(0)
    with pytest.raises(DecodingError, match="draft is None, but strategy dsbd drafts"):
        decode(target, None, [1], DecodingConfig(), rng)
    decode(target, draft, [1], DecodingConfig(strategy="sample"), rng)
    assert not draft.computed_paths
    with pytest.raises(DecodingError, match="draft has 5 tokens, target 6"):
        decode(*models(draft_vocab=5), [1], DecodingConfig(), rng)


def test_one_token_prompt_and_long_prompt_in_chunks():
    config = DecodingConfig(num_beams=2, width_policy="fixed", max_new_tokens=6)
    plain = DecodingConfig(strategy="beam-sample", num_beams=2, max_new_tokens=6)
    for prompt in ((2,), tuple(np.random.default_rng(0).integers(0, VOCAB, 600).tolist())):
        expected = run(plain, TARGET, None, VOCAB, 1, prompt)
        assert all_tokens(run(config, TARGET, DRAFT, VOCAB, 1, prompt)) == all_tokens(expected)


def test_same_seed_same_output_and_models_can_be_used_again():
    target, draft = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
    config = DecodingConfig(max_new_tokens=9, eos_token_id=(4, 5))
    first, again, other = (
        decode(target, draft, [1, 2], config, np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert all_tokens(first) == all_tokens(again) != all_tokens(other)


def test_all_mass_on_eos_ends_at_once_without_a_row_for_it():
    logits = np.full(VOCAB, -np.inf)
    logits[5] = 0.0
    model = TableModel(VOCAB, lambda path: logits)
    config = DecodingConfig(strategy="beam-sample", eos_token_id=5)
    result = decode(model, None, [1, 2, 3], config, np.random.default_rng(0))
    assert [s.token_ids for s in result.sequences] == [[5]]
    assert result.sequences[0].logprob == 0.0 and result.stats.target_rows == 3


class WrongShape(TableModel):
    def forward(self, forward):
        return ForwardResult(DenseLogits(super().forward(forward).logits.values[:, :-1]))


def test_a_model_that_breaks_its_word_is_named():
    config = DecodingConfig(strategy="sample")
    with pytest.raises(ModelError, match=r"shape \(0, 5\), expected \(0, 6\)"):
        decode(WrongShape(VOCAB, TARGET), None, [1, 2], config, np.random.default_rng(0))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("eos", [VOCAB, (0, VOCAB), 2**31 - 1])
def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused(strategy, eos):
    config = DecodingConfig(strategy=strategy, eos_token_id=eos)
    highest = max(config.eos_ids)
    with pytest.raises(DecodingError, match=f"eos_token_id has {highest}; expected 0 to 5"):
        run(config, TARGET, DRAFT, VOCAB, 0)


def test_the_last_id_of_the_vocabulary_may_end_a_sequence():
    config = DecodingConfig(strategy="greedy", eos_token_id=(0, VOCAB - 1))
    assert run(config, TARGET, None, VOCAB, 0).sequences
