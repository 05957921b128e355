"""What a server allows and how long it waits, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_ort.number_checks import MOST_BYTES, check_count, check_seconds
from dsbd_ort.openai_server.api_keys import ApiKeys


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What a server allows and how long it waits.

    Attributes:
        model_name: what requests call the model.
        keys: who may ask; None lets everybody.
        keys_everywhere: whether /health, /ready and /metrics want a key as well.
        max_prompt_tokens: of one prompt; None for what the context holds.
        max_new_tokens: of one sequence.
        max_beams: of one engine request: num_beams, joint_beams.
        max_draft_nodes: candidates of one drafted forest, all layers together.
        max_best_of: of one prompt: n, best_of.
        max_prompts: of one body.
        max_body_bytes: of one body.
        body_timeout_s: for a body to arrive.
        request_timeout_s: from a request's admission to its last token, the queue included.
    """

    model_name: str
    keys: ApiKeys | None = None
    keys_everywhere: bool = False
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 4096
    max_beams: int = 16
    max_draft_nodes: int = 256
    max_best_of: int = 16
    max_prompts: int = 16
    max_body_bytes: int = 2**20
    body_timeout_s: float = 10.0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None:
            check_count("max_prompt_tokens", self.max_prompt_tokens, 1)
        for name in (
            "max_new_tokens",
            "max_beams",
            "max_draft_nodes",
            "max_best_of",
            "max_prompts",
        ):
            check_count(name, getattr(self, name), 1)
        check_count("max_body_bytes", self.max_body_bytes, 1, MOST_BYTES)
        check_seconds("body_timeout_s", self.body_timeout_s)
        check_seconds("request_timeout_s", self.request_timeout_s)
