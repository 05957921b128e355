"""dsbd-serve: the arguments of an OpenAI-compatible HTTP server over a bundle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dsbd_ort.commands.option_types import (
    BYTES,
    COUNT,
    COUNT_OR_NONE,
    PATH,
    SECONDS,
    SECONDS_OR_NONE,
    WHOLE_SECONDS,
    NamedTrie,
    tries_by_name,
)
from dsbd_ort.commands.options import decoding_options, group, no_flag, option, pipeline_settings
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.openai_server.plain_tools import TOOL_TEMPLATES
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline import PipelineSettings

_SERVER = "Server"  # section of the help
_CONNECTION: dict[str, Any] = {"section": "Connections", "is_rare": True, "show_default": True}


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """Arguments of dsbd-serve; ``settings``: for ServingSettings; ``options``: request defaults."""

    host: str = option(
        default="127.0.0.1", show_default=True, help="Address to listen on.", section=_SERVER
    )
    port: int = option(
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        help="Port to listen on; 0: any free one.",
        section=_SERVER,
    )
    model_name: str | None = option(
        help="Name of the model in requests [the bundle's folder].", section=_SERVER
    )
    api_key_file: Path | None = option(
        type=PATH,
        help="Text file with one API key per line; without it no key is required.",
        section=_SERVER,
    )
    limits: ServiceLimits = group(
        ServiceLimits,
        section="Shared engine calls and memory",
        max_requests="Requests that are computed together.",
        max_queued=option(
            type=COUNT_OR_NONE, help="Requests that wait in addition; one more gets a 429."
        ),
        kv_bytes=option(type=BYTES, help="Maximum bytes of both engines' caches."),
    )
    settings: dict[str, Any] = group(
        dict,
        record=ServingSettings,
        section="Limits of a request",
        shows_docs=option(
            "--docs",
            help="Serve /docs, a page to try requests on (its scripts are loaded from a CDN).",
            section=_SERVER,
        ),
        keys_everywhere=option(
            help="Require a key for /health, /ready and /metrics too.",
            section=_SERVER,
            is_rare=True,
        ),
        max_prompt_tokens="Maximum tokens of a prompt [the context of the bundle].",
        max_new_tokens="Maximum new tokens of a sequence, and default of max_tokens "
        "[as many as the context holds].",
        max_beams="Maximum num_beams and joint_beams.",
        max_draft_nodes=option(help="Maximum candidates of a drafted forest.", is_rare=True),
        max_best_of=option(help="Maximum n and best_of.", is_rare=True),
        tries=option(
            "--trie",
            type=NamedTrie(),
            default=(),
            multiple=True,
            callback=tries_by_name,
            metavar="NAME=FILE",
            help="Token sequences that the constraint of a request may name; may be repeated.",
            section=_SERVER,
        ),
        tool_template=option(
            type=click.Choice(TOOL_TEMPLATES),
            help="For models whose chat template does not support tools. plain: tools are "
            "described in a text, calls are JSON; own: tool_choice auto is refused.",
            section=_SERVER,
        ),
        max_prompts=option(help="Maximum prompts of a request body.", is_rare=True),
        max_body_bytes=option(type=BYTES, help="Maximum bytes of a request body.", is_rare=True),
        body_timeout_s=option(
            "--body-timeout",
            type=SECONDS,
            help="Seconds for a request body to arrive.",
            is_rare=True,
        ),
        fetches_urls=option(
            "--allow-media-urls",
            help="Fetch pictures of chats from http and https URLs at public addresses.",
            section=_SERVER,
            is_rare=True,
        ),
        max_audio_bytes=option(
            type=BYTES,
            help="Maximum bytes of a request body with audio or pictures, and of a picture "
            "that is fetched.",
            is_rare=True,
        ),
        audio_timeout_s=option(
            "--audio-timeout",
            type=SECONDS,
            help="Seconds for a request body with audio or pictures to arrive.",
            is_rare=True,
        ),
        max_audio_s=option(
            "--max-audio-seconds",
            type=SECONDS,
            help="Longest audio; each second takes 64 kB of memory.",
            is_rare=True,
        ),
        request_timeout_s=option(
            "--request-timeout",
            type=SECONDS,
            help="Seconds for a whole request, including the queue.",
        ),
    )
    idle_timeout_s: int = option(
        "--idle-timeout",
        type=WHOLE_SECONDS,
        default=10,
        help="Seconds for a connection to begin a request.",
        **_CONNECTION,
    )
    stuck_timeout_s: float = option(
        "--stuck-timeout",
        type=SECONDS,
        default=60.0,
        help="Seconds after which a client that does not read its answer is dropped.",
        **_CONNECTION,
    )
    shutdown_timeout_s: float = option(
        "--shutdown-timeout",
        type=SECONDS_OR_NONE,
        default=30.0,
        help="Seconds for requests to finish after SIGTERM.",
        **_CONNECTION,
    )
    max_connections: int = option(
        type=COUNT,
        default=512,
        help="Maximum open connections; one more gets a 503.",
        **_CONNECTION,
    )
    logs_access: bool = no_flag(
        "--no-access-log", help="Do not log requests.", section=_SERVER, is_rare=True
    )
    options: dict[str, Any] = decoding_options(of_server=True)
    pipeline: PipelineSettings = pipeline_settings(of_server=True)
