"""Text by which the forms of int8 products are chosen: ours, or the user's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.parity_cases import ForestCase, own_text_ids, prefill_case, text_ids
from dsbd_export.texts import readable_files, texts_of

CALIBRATION_FILE = Path(__file__).parent / "calibration_text.txt"
_MOST_TOKENS = 512
_MOST_TEXTS = 32  # which share them


def calibration_case(checkpoint: Checkpoint, data: Sequence[str]) -> ForestCase:
    """Return text that the checkpoint reads once, as one prefill; the head reads every row.

    Raises ExportError if they are no readable texts.
    """
    if data:
        texts = list(itertools.islice(_texts(data), _MOST_TEXTS))
        if not texts:
            raise ExportError(f"calibration_texts={data[0]!r} has no text; give a file with some")
        token_ids = text_ids(checkpoint, texts, _MOST_TOKENS)
    else:
        token_ids = own_text_ids(checkpoint, CALIBRATION_FILE, _MOST_TOKENS)
    case = prefill_case(checkpoint, token_ids)
    return dataclasses.replace(case, rows=np.arange(len(case.node_ids)))


def _texts(data: Sequence[str]) -> Iterator[str]:
    """Yield the beginning of each text; of a chat, all that is said in it."""
    for file in readable_files("calibration_texts", data):
        for _name, pieces in texts_of(file):
            if text := "\n".join(itertools.islice(pieces, _MOST_TOKENS)):
                yield text
