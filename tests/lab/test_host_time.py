"""What stands in for engines while host time is measured says the same with either head."""

from __future__ import annotations

import numpy as np

from dsbd_ort.decoding import DecodingConfig, decode
from lab.host_time.bigram_models import DenseBigram, TopKBigram, random_pair


def test_the_top_k_head_gives_the_tokens_of_all_logits():
    target, draft = random_pair(300, 0.85)
    config = DecodingConfig(num_beams=2, top_k=8, max_new_tokens=12)
    dense = DenseBigram(target), DenseBigram(draft)
    with_head = TopKBigram(target, 16), TopKBigram(draft, 16)
    results = [
        decode(*pair, (1, 2, 3), config, np.random.default_rng(0)) for pair in (dense, with_head)
    ]
    sequences = [result.sequences[0] for result in results]
    assert sequences[0].token_ids == sequences[1].token_ids
    np.testing.assert_allclose(
        sequences[0].token_logprobs, sequences[1].token_logprobs, rtol=0, atol=1e-6
    )
    assert 0.0 < results[0].stats.draft_acceptance_rate < 1.0
