"""Bounds of the rows and nodes of a request, before it begins."""

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import MOST_FORCED_LAYERS


def most_draft_nodes(config: DecodingConfig) -> int:
    """Return how many nodes one draft may add.

    No layer is drafted for the last token. Forced layers of a constraint are as wide as any.
    """
    most_layers = config.max_new_tokens - 1
    if not config.drafts or config.constraint is None:
        return sum(config.layer_widths[:most_layers])
    num_layers = min(most_layers, len(config.layer_widths) + MOST_FORCED_LAYERS)
    return num_layers * max(config.num_beams, config.most_draft_beams)


def most_descendants(config: DecodingConfig) -> int:
    """Return how many nodes below the beams pruning may leave: two drafts' worth, the oldest.

    So that the rows of a request have a bound. Others are computed again if they are selected.
    """
    return 2 * most_draft_nodes(config)


def most_rows(
    num_prompt_tokens: int, config: DecodingConfig, *, has_top_k_head: bool = True
) -> int:
    """Return a bound of the rows that a request ever holds in the cache of one engine.

    The paths of the beams take at most ``num_beams`` rows a token. Added are the nodes that pruning
    leaves, and the rows of one iteration: a draft, and the selected nodes of every layer.

    has_top_k_head: of the target, which may have to compute a node again.
    """
    num_beams = config.widest_search
    num_forced = MOST_FORCED_LAYERS if config.drafts and config.constraint is not None else 0
    num_layers = min(len(config.layer_widths) + num_forced + 1, config.max_new_tokens)
    on_paths = num_beams * (config.max_new_tokens + 1)
    left = num_beams + most_descendants(config)
    added = most_draft_nodes(config) + (num_layers + 1) * num_beams
    if config.processes_logits:
        added *= 2 if has_top_k_head else 1  # see ForestRunner.compute
    elif config.row.rule == "search":  # see ForestRunner.read_left_out
        added += num_beams
    return num_prompt_tokens + on_paths + left + added


_MOST_EXPECTED_TOKENS = 1024


def expected_rows(num_prompt_tokens: int, config: DecodingConfig) -> int:
    """Return the rows that a request usually comes to hold, if it runs to its end.

    Its beams share most tokens. A very long answer is expected to end sooner: attention reads all
    rows for which there is room.
    """
    num_tokens = num_prompt_tokens + min(config.max_new_tokens, _MOST_EXPECTED_TOKENS)
    return min(num_tokens + most_descendants(config), most_rows(num_prompt_tokens, config))


def most_new_tokens(
    num_prompt_tokens: int, config: DecodingConfig, max_rows: int, *, has_top_k_head: bool = True
) -> int:
    """Return the ``max_new_tokens`` with which ``most_rows`` is at most ``max_rows``."""
    bound = most_rows(num_prompt_tokens, config, has_top_k_head=has_top_k_head)
    return config.max_new_tokens + (max_rows - bound) // config.widest_search
