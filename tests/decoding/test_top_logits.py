"""Engines with a top-k head: every strategy gives the tokens of the dense engine, or refuses."""

import numpy as np
import pytest

from dsbd_forward.forward import ForwardResult
from dsbd_forward.logits import TopLogits
from dsbd_ort.decoding import (
    ConfigError,
    DecodingConfig,
    ModelError,
    TableModel,
    decode,
)
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from tests.decoding.tables import check_like_dense, mixed_table, random_table, request_on
from tests.decoding.top_table import TopTable

VOCAB, NUM_CANDIDATES, EOS = 24, 10, 5
PROMPT = (1, 0, 1)
SMOOTH = random_table(7, VOCAB)


def target(path):
    """Logits in halves: many ties, also at the cut of top-k."""
    return np.round(SMOOTH(path) * 2) / 2


DRAFT = mixed_table(target, random_table(8, VOCAB), 0.7)

SAMPLING = [
    {"strategy": "dsbd"},
    {"strategy": "dsbd", "width_policy": "fixed", "coupling": "rejection"},
    {"strategy": "dsbd", "coupling": "rejection", "replacement": True},
    {"strategy": "dsbd", "replacement": True},
    {"strategy": "dsbd", "memory": "single"},
    {"strategy": "dsbd", "width_policy": "fixed", "draft_policy": "throughput"},
    {"strategy": "beam-sample"},
    {"strategy": "beam-sample", "coupling": "rejection"},
    {"strategy": "speculative"},
    {"strategy": "speculative", "coupling": "rejection"},
    {"strategy": "tree-speculative", "coupling": "rejection"},
    {"strategy": "sample", "top_p": 0.7, "temperature": 1.4},
    {"strategy": "dsbd", "coupling": "rejection", "top_p": 0.8, "temperature": 0.6},
    {"strategy": "mjsd"},
    {"strategy": "mjsd", "temperature": 0.0},
    {"strategy": "mjgd"},
]
SEARCHES = [
    {"strategy": "beam-search"},
    {"strategy": "speculative-beam-search", "early_stopping": "never"},
    {"strategy": "greedy"},
]
CASES = [{"top_k": k, **options} for options in SAMPLING for k in (4, NUM_CANDIDATES)] + SEARCHES


def decoded(target_model, draft_model, seed, **options):
    config = DecodingConfig(**({"max_new_tokens": 8, "eos_token_id": EOS} | options))
    uses_draft = draft_model if config.row.has_draft else None
    return decode(target_model, uses_draft, PROMPT, config, np.random.default_rng(seed))


def dense(table):
    return TableModel(VOCAB, table)


def topk(table, num_candidates=NUM_CANDIDATES):
    return TopTable(VOCAB, table, num_candidates)


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_same_tokens_as_the_dense_engine(options):
    for seed in range(6):
        expected = decoded(dense(target), dense(DRAFT), seed, **options)
        for models in (
            (topk(target), topk(DRAFT)),
            (topk(target), dense(DRAFT)),
            (dense(target), topk(DRAFT)),
        ):
            check_like_dense(decoded(*models, seed, **options), expected)


def test_calls_and_rows_are_counted():
    options = {"strategy": "dsbd", "top_k": 4}
    expected = decoded(dense(target), dense(DRAFT), 0, **options).stats
    found = decoded(topk(target), topk(DRAFT), 0, **options).stats
    for name in ("target_calls", "draft_calls", "target_rows", "draft_rows"):
        assert getattr(found, name) == getattr(expected, name) > 0


ALL_OF_THEM = r"top_k is 0 \(all tokens\), but the target's engine returns .*use top_k 1 to 10, or"
REFUSED = [  # (options, K of the target, K of the draft, words of the message)
    ({"strategy": "sample"}, 10, 10, ALL_OF_THEM + " export again, .*keeps them all"),
    ({"strategy": "mjsd"}, 10, 10, ALL_OF_THEM),
    ({"strategy": "dsbd", "top_k": 11}, 10, 10, r"top_k is 11, .* keeps no others; use"),
    ({"strategy": "sample", "top_k": 99}, 10, 10, r"top_k is 99.*or with --logits full\)$"),
    ({"strategy": "beam-search", "num_beams": 6}, 10, 10, r"num_beams is 6, .*12 best .*topk:12"),
]


@pytest.mark.parametrize(("options", "of_target", "of_draft", "words"), REFUSED)
def test_more_tokens_than_the_engine_returns_are_refused(options, of_target, of_draft, words):
    with pytest.raises(ConfigError, match=words):
        decoded(topk(target, of_target), topk(DRAFT, of_draft), 0, **options)


def test_a_draft_that_the_strategy_does_not_touch_may_have_any_head():
    decoded(topk(target), topk(DRAFT, 1), 0, strategy="beam-sample", top_k=4)


class ShortRows(TopTable):
    def forward(self, forward):
        found = super().forward(forward).logits
        return ForwardResult(TopLogits(found.top_ids, found.top_logits[:, 1:], found.logsumexp))


def test_candidates_of_a_wrong_shape_are_named():
    model = ShortRows(VOCAB, target, NUM_CANDIDATES)
    with pytest.raises(ModelError, match=r"top_logits of shape \(0, 9\), expected \(0, 10\)"):
        decoded(model, None, 0, strategy="sample", top_k=4)


MANY_TIES = random_table(9, VOCAB)


def tied(path):
    """Logits of which several are equal, at the cut of any K."""
    return np.round(MANY_TIES(path))


FULL_CASES = [
    {"strategy": "beam-search", "num_beams": 6},
    {"strategy": "beam-search", "num_beams": 12, "early_stopping": "never"},
    {"strategy": "speculative-beam-search", "num_beams": 6, "draft_length": 3},
    {"strategy": "speculative-beam-search", "num_beams": 3, "draft_length": 4, "draft_beams": 9},
    {"strategy": "greedy", "eos_token_id": [1, 2, 3, 4, 5, 6]},
]


@pytest.mark.parametrize("table", [SMOOTH, tied], ids=["smooth", "tied"])
@pytest.mark.parametrize("num_top_logits", [1, 2, 5, 11])
@pytest.mark.parametrize("options", FULL_CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_a_search_reads_other_logits_only_where_they_matter(options, num_top_logits, table):
    draft = mixed_table(table, random_table(8, VOCAB), 0.9)
    num_read = num_computed = 0
    for seed in range(4):
        options = {"num_return_sequences": options.get("num_beams", 1), **options}
        expected = decoded(dense(table), dense(draft), seed, max_new_tokens=10, **options)
        model = TopTable(VOCAB, table, num_top_logits, keeps_full=True)
        found = decoded(model, topk(draft, 2), seed, max_new_tokens=10, **options)
        check_like_dense(found, expected)
        num_read += sum(map(len, model.rows_read))
        num_computed += found.stats.target_rows
    if num_top_logits == 1:
        assert num_read > 0
    if num_top_logits == 11:
        assert num_read < num_computed / 2


SEARCHED_TOGETHER = [
    {"strategy": "beam-search", "num_beams": 2},
    {"strategy": "speculative-beam-search", "num_beams": 2},
    {"strategy": "greedy", "logit_bias": {3: 2.0}},
    {"strategy": "beam-sample", "num_beams": 2, "top_k": 2, "repetition_penalty": 0.7},
]


@pytest.mark.parametrize("options", SEARCHED_TOGETHER, ids=lambda o: o["strategy"])
def test_logits_that_count_are_read_whatever_rows_of_others_are_after_them(options):
    """An engine keeps all logits of a forward's last rows: those of who came last."""
    config = DecodingConfig(max_new_tokens=12, **options)

    def models():
        return [TopTable(VOCAB, table, 2, keeps_full=True) for table in (target, DRAFT)]

    prompts = [(1, 0), (2, 3, 1), (4,)]
    forest = BatchedDecoder(*models())
    members, results = [forest.join(request_on(config, prompt)) for prompt in prompts], {}
    num_forwards = 0
    while forest.num_live:
        num_forwards += 1
        for progress in forest.iterate():
            assert not isinstance(progress.event, Exception), progress.event
            results[progress.live] = progress.event
    rows_a_layer = config.num_beams + 1  # of a layer together, then one after the other
    assert num_forwards <= 12 * rows_a_layer + 4, "a request waits until the others have ended"
    for member, prompt in zip(members, prompts, strict=True):
        alone = decode(*models(), prompt, config, np.random.default_rng(0))
        assert results[member].sequences == alone.sequences
