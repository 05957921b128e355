"""The ratios to other tools that were aimed at."""

from __future__ import annotations

from peers.catalog import DSBD, DSBD_SHAPE, SPECULATIVE_SEARCH
from peers.summary import Bar

_SEARCH_AIMS = {
    "openvino-genai": {"fp32": 1.15, "int8": 1.5},
    "ctranslate2": {"fp32": 2.0, "int8": 4.0},
}

BARS = (
    *(
        Bar(ours=ours, peer="transformers", run="beam sampling W=4", precision="fp32", aim=6.0)
        for ours in (DSBD, DSBD_SHAPE)
    ),
    *(
        Bar(ours=SPECULATIVE_SEARCH, peer=peer, run="beam search W=4", precision=precision, aim=aim)
        for peer, aims in _SEARCH_AIMS.items()
        for precision, aim in aims.items()
    ),
)
