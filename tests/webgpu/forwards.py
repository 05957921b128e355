"""Forwards of an engine, without a request."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_runtime.engine.causal_lm import CausalLM


def forward(model: CausalLM, num_rows: int, num_logit_rows: int | None = None) -> NDArray[Any]:
    """Append rows that see all before them; return what the head says of the last ones.

    num_logit_rows: None for all.
    """
    first = model.num_rows
    last = num_rows - (num_rows if num_logit_rows is None else num_logit_rows)
    result = model.forward(
        Forward(
            token_ids=(np.arange(num_rows) * 7 + first) % model.spec.vocab_size,
            positions=np.arange(first, first + num_rows),
            mask=np.tri(num_rows, first + num_rows, first, dtype=np.bool_),
            logit_rows=np.arange(last, num_rows),
        )
    ).logits
    if result.whole is not None:
        return result.whole
    return np.concatenate([*result.most_probable(0), result.log_normalizers], axis=1)
