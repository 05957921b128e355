"""dsbd-serve: the arguments of an OpenAI-compatible HTTP server over a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dsbd_ort.commands.constraint_options import NamedTrie, tries_by_name
from dsbd_ort.commands.option_types import (
    BYTES,
    COUNT,
    COUNT_OR_NONE,
    PATH,
    SECONDS,
    SECONDS_OR_NONE,
    WHOLE_SECONDS,
)
from dsbd_ort.commands.options import (
    decoding_options,
    flag,
    group,
    no_flag,
    option,
    pipeline_settings,
)
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.openai_server.default_options import NEVER_DEFAULTS
from dsbd_ort.openai_server.plain_tools import PLAIN, TOOL_TEMPLATES
from dsbd_ort.pipeline import PipelineSettings

_SERVER, _CONNECTIONS = "Server", "Connections"  # sections of the help


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """The arguments of dsbd-serve; ``settings`` are fields of ServingSettings.

    ``options`` are the server's defaults of requests.
    """

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
        max_requests=option(
            type=COUNT, show_default=True, help="Requests that share the engine calls."
        ),
        max_queued=option(
            type=COUNT_OR_NONE,
            show_default=True,
            help="Requests that wait beyond those; one more gets a 429.",
        ),
        kv_bytes=option(type=BYTES, help="Maximum bytes of both engines' caches."),
    )
    settings: dict[str, Any] = group(
        dict,
        section="Limits of a request",
        shows_docs=flag(
            "--docs",
            help="Serve /docs, a page to try requests on (its scripts come from a CDN).",
            section=_SERVER,
        ),
        keys_everywhere=flag(
            help="Require a key for /health, /ready and /metrics too.", section=_SERVER
        ),
        max_prompt_tokens=option(
            type=COUNT, help="Maximum tokens of a prompt [the context of the bundle]."
        ),
        max_new_tokens=option(
            type=COUNT,
            help="Maximum new tokens of a sequence; as many without max_tokens "
            "[as the context holds].",
        ),
        max_beams=option(
            type=COUNT, default=16, show_default=True, help="Maximum num_beams and joint_beams."
        ),
        max_draft_nodes=option(
            type=COUNT,
            default=256,
            show_default=True,
            help="Maximum candidates of a drafted forest.",
        ),
        max_best_of=option(
            type=COUNT, default=16, show_default=True, help="Maximum n and best_of."
        ),
        tries=option(
            "--trie",
            type=NamedTrie(),
            multiple=True,
            callback=tries_by_name,
            metavar="NAME=FILE",
            help="Token sequences that a request's constraint may name; may be repeated.",
            section=_SERVER,
        ),
        tool_template=option(
            type=click.Choice(TOOL_TEMPLATES),
            default=PLAIN,
            show_default=True,
            help="How a model whose chat template has no known form of tools is offered them: "
            "plain: by a text, with JSON calls; own: not at all, tool_choice auto is refused.",
            section=_SERVER,
        ),
        max_prompts=option(
            type=COUNT, default=16, show_default=True, help="Maximum prompts of a request body."
        ),
        max_body_bytes=option(
            type=BYTES, default=2**20, show_default=True, help="Maximum bytes of a request body."
        ),
        body_timeout_s=option(
            "--body-timeout",
            type=SECONDS,
            default=10.0,
            show_default=True,
            help="Seconds for a request body to arrive.",
        ),
        max_audio_bytes=option(
            type=BYTES,
            default=25 * 2**20,
            show_default=True,
            help="Maximum bytes of a request body with audio.",
        ),
        audio_timeout_s=option(
            "--audio-timeout",
            type=SECONDS,
            default=60.0,
            show_default=True,
            help="Seconds for a request body with audio to arrive.",
        ),
        max_audio_s=option(
            "--max-audio-seconds",
            type=SECONDS,
            default=3600.0,
            show_default=True,
            help="Longest audio; its samples take 64 kB of memory a second.",
        ),
        request_timeout_s=option(
            "--request-timeout",
            type=SECONDS,
            default=600.0,
            show_default=True,
            help="Seconds for a whole request, including the queue.",
        ),
    )
    idle_timeout_s: int = option(
        "--idle-timeout",
        type=WHOLE_SECONDS,
        default=10,
        show_default=True,
        help="Seconds for a connection to begin a request.",
        section=_CONNECTIONS,
    )
    stuck_timeout_s: float = option(
        "--stuck-timeout",
        type=SECONDS,
        default=60.0,
        show_default=True,
        help="Seconds after which a client that reads nothing of an answer is dropped.",
        section=_CONNECTIONS,
    )
    shutdown_timeout_s: float = option(
        "--shutdown-timeout",
        type=SECONDS_OR_NONE,
        default=30.0,
        show_default=True,
        help="Seconds for requests to finish after SIGTERM.",
        section=_CONNECTIONS,
    )
    max_connections: int = option(
        type=COUNT,
        default=512,
        show_default=True,
        help="Maximum open connections; one more gets a 503.",
        section=_CONNECTIONS,
    )
    logs_access: bool = no_flag("--no-access-log", help="Do not log requests.", section=_SERVER)
    options: dict[str, Any] = decoding_options(without=NEVER_DEFAULTS)
    pipeline: PipelineSettings = pipeline_settings(of_server=True)
