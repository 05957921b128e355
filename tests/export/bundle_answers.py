"""Answers of a bundle and of a model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsbd_ort.pipeline import Pipeline

PROMPT = [5, 6, 7, 8, 9, 10]
NEW_TOKENS = 8


def assert_answers_as(bundle: Path, model: Any) -> None:
    """Compare the most probable continuation of a prompt, and its log-probabilities."""
    with Pipeline.from_bundle(bundle) as pipeline:
        options = {"strategy": "greedy", "max_new_tokens": NEW_TOKENS, "eos_token_id": []}
        found = pipeline.generate(PROMPT, **options).sequences[0]
    ids = torch.tensor([[*PROMPT, *found.token_ids]])
    with torch.inference_mode():
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    wanted = torch.log_softmax(logits.double(), dim=-1)
    assert list(found.token_ids) == wanted.argmax(dim=-1).tolist()
    np.testing.assert_allclose(found.token_logprobs, wanted.max(dim=-1).values, atol=1e-4)
