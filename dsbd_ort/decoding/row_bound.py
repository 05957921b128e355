"""Most cache rows that a request can need: what must be free before it may begin."""

from __future__ import annotations

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.forest_cache import MOST_TOLD_APART


def most_rows(num_prompt_tokens: int, config: DecodingConfig) -> int:
    """Return a bound of the rows that a request ever holds in the cache of one engine.

    Attained by nobody: beams that share no token are rare, and so are drafts that all stay useful.
    The paths of the beams take at most ``num_beams`` rows a token. Below the beams an iteration
    adds the drafted nodes and, a layer, as many as are selected; each layer lies at most so many
    iterations below the beams as a draft has layers. Rows that nobody sees stay until there are
    MOST_TOLD_APART. All of that is there once more while a call adds what it computes.
    """
    num_beams = max(config.width, config.joint_beams or 1)
    num_layers = len(config.layer_widths) + 1
    below_beams = num_layers * (sum(config.layer_widths) + num_layers * num_beams)
    on_paths = num_beams * (config.max_new_tokens + 1)
    return num_prompt_tokens + on_paths + MOST_TOLD_APART + 2 * below_beams
