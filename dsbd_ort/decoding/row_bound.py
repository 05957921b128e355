"""How many cache rows a request can need at most: so many must be free before it may begin."""

from __future__ import annotations

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.forest_cache import MOST_TOLD_APART


def most_descendants(config: DecodingConfig) -> int:
    """Return how many nodes below the beams pruning may leave.

    Two drafts' worth, the oldest first; without a bound nobody could tell what a request will need.
    One that is left out and wanted after all is computed again.
    """
    return 2 * sum(config.layer_widths)


def most_rows(num_prompt_tokens: int, config: DecodingConfig) -> int:
    """Return a bound of the rows that a request ever holds in the cache of one engine.

    The paths of the beams take at most ``num_beams`` rows a token (beams that share no token: no
    request is like that). Then come the nodes that pruning leaves, or the rows that wait to be
    dropped, and what an iteration adds: a draft, and as many nodes a layer as are selected.
    """
    num_beams = max(config.width, config.joint_beams or 1)
    num_layers = len(config.layer_widths) + 1
    on_paths = num_beams * (config.max_new_tokens + 1)
    left = max(MOST_TOLD_APART, num_beams + most_descendants(config))
    added = sum(config.layer_widths) + (num_layers + 1) * num_beams
    return num_prompt_tokens + on_paths + left + added
