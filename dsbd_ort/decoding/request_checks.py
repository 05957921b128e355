"""What a request may not be decoded with: prompt, models and stop state, checked before work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.errors import DecodingError
from dsbd_ort.decoding.option_values import shown
from dsbd_ort.decoding.step_model import RowCache
from dsbd_ort.decoding.stopping import StopState


def check_request(
    target: RowCache,
    draft: RowCache | None,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    stop: StopState | None,
) -> None:
    """Refuse a prompt, models or a missing stop state that the request cannot be decoded with."""
    if config.stop_texts and stop is None:
        raise DecodingError(
            f"stop_strings is {shown(config.stop_texts)}, but decoding sees tokens, not text; give "
            "decode a stop state as well, or use Pipeline"
        )
    highest_eos = max(config.eos_ids, default=0)
    if highest_eos >= target.vocab_size:
        raise DecodingError(
            f"eos_token_id has {highest_eos}; expected 0 to {target.vocab_size - 1}, the target's "
            "vocabulary"
        )
    if not len(prompt_ids):
        raise DecodingError("the prompt has no token; give at least one")
    for token_id in prompt_ids:
        if isinstance(token_id, bool | np.bool_) or not isinstance(token_id, int | np.integer):
            raise DecodingError(
                f"the prompt has a {type(token_id).__name__} among its token ids; expected whole "
                "numbers"
            )
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= target.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise DecodingError(
            f"prompt has token id {shown(int(wrong))}; expected 0 to {target.vocab_size - 1}, the "
            "target's vocabulary"
        )
    if not config.row.has_draft:
        return
    if draft is None:
        raise DecodingError(
            f"draft is None, but strategy {config.strategy} drafts; give a draft model or use a "
            "strategy without one, such as beam-sample"
        )
    if draft.vocab_size != target.vocab_size:
        raise DecodingError(
            f"draft has {draft.vocab_size} tokens, target {target.vocab_size}; use a pair that "
            "shares its vocabulary"
        )
