"""Memory of nodes' distributions: at most half of a float64 array per node."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, DecodingRequest, TableModel, decode_iterations

VOCAB = 4096
NUM_NODES = 128
LOGITS = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drafted_nodes_hold_their_logits_once(temperature: float) -> None:
    config = DecodingConfig(
        num_beams=2,
        width_policy="fixed",
        draft_length=4,
        draft_beams=NUM_NODES // 4,
        max_new_tokens=12,
        temperature=temperature,
    )
    target, draft = (TableModel(VOCAB, lambda path: LOGITS) for _ in range(2))
    steps = decode_iterations(
        DecodingRequest(prompt_ids=(1,), config=config, rng=np.random.default_rng(0)), target, draft
    )
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            next(steps)
        gc.collect()
        held, peak = (bytes_ - before for bytes_ in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    of_a_node = 4 * VOCAB
    assert held < 2 * NUM_NODES * of_a_node  # pruning leaves two drafts at most
    assert peak < 6 * NUM_NODES * of_a_node  # three of them are the table's own
