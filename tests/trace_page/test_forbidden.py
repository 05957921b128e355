"""Tokens that a constraint forbids, as a trace shows them."""

import json
from typing import Any

import numpy as np
import pytest

from dsbd_ort import AllowedTokens, Pipeline, RequestTrace, TokenTrie
from dsbd_ort.decoding import DecodingConfig, TableModel, decode
from dsbd_ort.decoding.logits_processing.allowed_after import MOST_FORBIDDEN
from dsbd_ort.trace_page.trace_file import page_html, trace_object
from tests.trace_page.conftest import PROMPT
from tests.trace_page.test_trace_file import embedded

VOCAB = 50
ALLOWED = {3, 7, 11}


def logits_of(path: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([len(path), *path]).normal(0, 2, VOCAB)


@pytest.mark.parametrize("strategy", ["beam-sample", "dsbd"])
def test_the_likeliest_forbidden_tokens_of_every_computed_node(strategy: str) -> None:
    constraint = AllowedTokens(lambda path: sorted(ALLOWED), eos_token_ids=())
    trace = RequestTrace()
    models = [TableModel(VOCAB, logits_of) for _ in range(2)]
    request_options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 5}
    if strategy == "dsbd":
        request_options |= {"draft_length": 2}
    config = DecodingConfig(strategy=strategy, constraint=constraint, **request_options)

    draft = models[1] if strategy == "dsbd" else None
    decode(models[0], draft, [1, 2], config, np.random.default_rng(0), trace=trace)
    num_told = 0
    for iteration in trace.iterations:
        by_id = {node.id: node for node in iteration.nodes}
        for node in iteration.nodes:
            path, link = [], node
            while link.parent is not None and link.parent in by_id:
                path.append(link.token)
                link = by_id[link.parent]
            if link.id != 0 or not node.forbidden:
                continue
            logits = logits_of((1, 2, *path[::-1])).astype(np.float32).astype(np.float64)
            probabilities = np.exp(logits) / np.exp(logits).sum()
            order = [token for token in np.argsort(-logits).tolist() if token not in ALLOWED]
            wanted = order[:MOST_FORBIDDEN]
            assert [token for token, _ in node.forbidden] == wanted
            assert [p for _, p in node.forbidden] == pytest.approx(probabilities[wanted], rel=1e-5)
            num_told += 1
    assert num_told >= 4


def test_the_page_of_a_constrained_request(pipeline: Pipeline) -> None:
    trie = TokenTrie.from_sequences([[5, 6, 7], [5, 8, 9, 10], [11, 12]])
    for constraint, name in (
        (trie, "the token trie of"),
        ({"regex": "[ab]{4}"}, "the regex '[ab]{4}'"),
    ):
        trace = RequestTrace()
        options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4, "seed": 0}
        pipeline.generate(
            PROMPT,
            trace=trace,
            constraint=constraint,
            logits_processors=[lambda path, scores: scores],
            **options,
        )
        fields = trace_object(trace, pipeline.tokenizer)
        assert fields["config"]["constraint"].startswith(name)
        assert len(fields["config"]["logits_processors"]) == 1
        root = fields["iterations"][0]["nodes"][0]
        assert len(root["forbidden"]) == MOST_FORBIDDEN
        assert all(token in fields["labels"] for token, _ in root["forbidden"])
        (data,) = embedded(page_html(fields))
        assert json.loads(data) == json.loads(json.dumps(fields))


def test_without_a_constraint_nothing_is_forbidden(requests: dict[str, Any]) -> None:
    for trace, _, fields in requests.values():
        assert not any(node.forbidden for each in trace.iterations for node in each.nodes)
        assert fields["config"]["constraint"] is None
