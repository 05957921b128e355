"""Checks of requests against the limits of the server."""

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.engine.limits import MOST
from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.settings import ServingSettings

_MAX_STOPS, _MAX_STOP_CHARACTERS, _MAX_EOS_IDS = 16, 256, 64


def check_config(config: DecodingConfig, settings: ServingSettings) -> None:
    """Raise ErrorResponse for options that cost more than the server allows."""
    joint_tokens = config.joint_tokens if config.row.rule == "joint-greedy" else 0
    longest_stop = max(map(len, config.stop_strings), default=0)
    draft_nodes = " candidates over all draft layers"
    num_drafted = sum(config.layer_widths) if config.draft_policy else 0  # else our own choice
    for name, value, limit, unit in (
        ("max_new_tokens", config.max_new_tokens, settings.max_new_tokens or MOST, ""),
        ("num_beams", config.num_beams, settings.max_beams, ""),
        ("joint_beams", config.widest_search, settings.max_beams, ""),
        ("joint_tokens", joint_tokens, settings.max_draft_nodes, ""),
        ("draft_beams", num_drafted, settings.max_draft_nodes, draft_nodes),
        ("stop", len(config.stop_strings), _MAX_STOPS, " stop texts"),
        ("stop", longest_stop, _MAX_STOP_CHARACTERS, " characters in one stop text"),
        ("eos_token_id", len(config.eos_ids), _MAX_EOS_IDS, " token ids"),
    ):
        check_limit(name, value, limit, unit)


def check_prompt(num_tokens: int, settings: ServingSettings) -> None:
    """Reject a prompt that is longer than the server allows."""
    limit = settings.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise bad_request(
            f"the prompt has {num_tokens} tokens, this server allows {limit}; shorten it",
            "prompt",
            "context_length_exceeded",
        )


def check_limit(name: str, value: int, limit: int, unit: str = "") -> None:
    """Reject a field that exceeds a limit; ``unit`` follows the value in the message."""
    if value > limit:
        raise bad_request(
            f"{name} amounts to {value}{unit}, this server allows {limit}; lower it",
            name,
            "limit_exceeded",
        )
