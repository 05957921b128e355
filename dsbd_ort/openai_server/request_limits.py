"""What one request may cost."""

from __future__ import annotations

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.openai_server.refusal import bad_request
from dsbd_ort.openai_server.settings import ServingSettings

_MOST_STOPS, _MOST_STOP_CHARACTERS, _MOST_EOS_IDS = 16, 256, 64
_MEANT = {
    "draft_beams": " candidates, all layers of draft_length together",
    "stop": " texts, or characters of one",
    "n": " sequences to try",
    "prompt": " prompts",
}


def check_config(config: DecodingConfig, settings: ServingSettings) -> None:
    """Refuse options that cost more than the server allows.

    Raises:
        Refusal: names the field, the value and the limit.
    """
    longest_stop = max(map(len, config.stop_texts), default=0)
    for name, value, most in (
        ("max_new_tokens", config.max_new_tokens, settings.max_new_tokens),
        ("num_beams", config.width, settings.max_beams),
        ("joint_beams", config.joint_beams or 0, settings.max_beams),
        ("joint_tokens", config.joint_tokens or 0, settings.max_draft_nodes),
        ("draft_beams", sum(config.layer_widths), settings.max_draft_nodes),
        ("stop", len(config.stop_texts), _MOST_STOPS),
        ("stop", longest_stop, _MOST_STOP_CHARACTERS),
        ("eos_token_id", len(config.eos_ids), _MOST_EOS_IDS),
    ):
        check_most(name, value, most)


def check_prompt(num_tokens: int, settings: ServingSettings) -> None:
    """Refuse a prompt that is longer than the server allows."""
    most = settings.max_prompt_tokens
    if most is not None and num_tokens > most:
        raise bad_request(
            f"the prompt has {num_tokens} tokens, this server takes {most}; shorten it",
            "prompt",
            "context_length_exceeded",
        )


def check_most(name: str, value: int, most: int) -> None:
    """Refuse a field that is over the server's limit."""
    if value > most:
        meant = _MEANT.get(name, "")
        raise bad_request(
            f"{name} comes to {value}{meant}, this server allows {most}; lower it",
            name,
            "limit_exceeded",
        )
