"""Settings of the server: its limits, timeouts and API keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsbd_ort.constraints import TokenTrie
from dsbd_ort.engine.limits import MOST_BYTES, check_count, check_seconds
from dsbd_ort.openai_server.plain_tools import PLAIN, TOOL_TEMPLATES
from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short

_COUNTS = ("max_beams", "max_draft_nodes", "max_best_of", "max_prompts")


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Limits, timeouts and API keys of a server.

    Attributes:
        model_name: the ``model`` of requests.
        keys: accepted ``ApiKeys``; None for no authentication.
        shows_docs: whether to serve /docs, a page that loads its scripts from elsewhere.
        keys_everywhere: whether /health, /ready and /metrics require a key as well.
        max_prompt_tokens: tokens of one prompt; None for the context length.
        max_new_tokens: tokens of one sequence; None for as many as the context holds.
        max_beams: limit of num_beams and of joint_beams.
        max_draft_nodes: candidates of one drafted forest, over all draft layers.
        max_best_of: limit of n and of best_of.
        max_audio_s: seconds of one audio; each second takes 64 kB of memory for its samples.
        fetches_urls: whether pictures of chats may be http and https URLs, see MediaFetcher.
        defaults: options for requests that leave them out, see ServerDefaults.
        tries: tries that requests may name, see dsbd_ort.TokenTrie.
        tool_template: if the model's chat template does not support tools: ``PLAIN`` offers them
            as plain text, ``OWN`` refuses them.
        request_timeout_s: from the arrival of a request to its last token, including the queue.
    """

    model_name: str
    keys: Any = None
    shows_docs: bool = False
    keys_everywhere: bool = False
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_beams: int = 16
    max_draft_nodes: int = 256
    max_best_of: int = 16
    max_prompts: int = 16
    max_body_bytes: int = 2**20
    body_timeout_s: float = 10.0
    max_audio_bytes: int = 25 * 2**20
    audio_timeout_s: float = 60.0
    max_audio_s: float = 3600.0
    fetches_urls: bool = False
    request_timeout_s: float = 600.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tries: Mapping[str, TokenTrie] = field(default_factory=dict)
    tool_template: str = PLAIN

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_new_tokens", *_COUNTS):
            if (value := getattr(self, name)) is not None or name in _COUNTS:
                check_count(name, value, 1)
        check_count("max_body_bytes", self.max_body_bytes, 1, MOST_BYTES)
        check_count("max_audio_bytes", self.max_audio_bytes, 1, MOST_BYTES)
        for name in ("body_timeout_s", "audio_timeout_s", "max_audio_s", "request_timeout_s"):
            check_seconds(name, getattr(self, name))
        if self.tool_template not in TOOL_TEMPLATES:
            raise InputError(
                f"tool_template is {in_short(self.tool_template)}; expected one of "
                f"{', '.join(TOOL_TEMPLATES)}"
            )
