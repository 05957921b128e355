"""Real text, prose and code, as the case by which lower precisions are judged.

Forests of random tokens find a wrong mask or position. How much a rounded weight matters shows
only on text that the model expects something of.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.forest_cases import ForestCase, Reference, reference_logits
from dsbd_export.tokenizer_file import read_tokenizer

TEXT_FILE = Path(__file__).parent / "parity_text.txt"
TEXT = "text"
_MAX_TOKENS = 320  # all of the text with the tokenizers of common models
_MAX_COMPARED_ROWS = 128  # evenly spread: 128 rows of 128,256 logits are 66 MB


def text_reference(model: PreTrainedModel, checkpoint: Checkpoint) -> Reference:
    """Return the text as one prefill, and what the unmodified model says of it."""
    case = text_case(checkpoint)
    return Reference(case=case, logits=reference_logits(model, case))


def text_case(checkpoint: Checkpoint) -> ForestCase:
    """Return the text in tokens of the checkpoint's own tokenizer, cut to its context."""
    token_ids = _token_ids(checkpoint)[: min(_MAX_TOKENS, checkpoint.context_length)]
    num_rows = min(len(token_ids), _MAX_COMPARED_ROWS)
    return ForestCase(
        name=TEXT,
        prefix_ids=token_ids[:0],
        node_ids=token_ids,
        parents=np.arange(-1, len(token_ids) - 1),
        rows=np.linspace(0, len(token_ids) - 1, num_rows).astype(np.int64),
    )


def _token_ids(checkpoint: Checkpoint) -> NDArray[np.int64]:
    tokenizer = Tokenizer.from_str(json.dumps(read_tokenizer(checkpoint)))
    text = TEXT_FILE.read_text(encoding="utf-8")
    token_ids = np.array(tokenizer.encode(text).ids, np.int64)
    if len(token_ids) == 0 or token_ids.max() >= checkpoint.vocab_size:
        raise ExportError(
            f"the tokenizer of the {checkpoint.role} at {checkpoint.folder} turns text into "
            f"{len(token_ids)} tokens up to {token_ids.max(initial=-1)}, expected tokens below the "
            f"vocabulary size {checkpoint.vocab_size}; copy the tokenizer of its base model there"
        )
    return token_ids
