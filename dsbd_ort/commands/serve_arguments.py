"""The options of dsbd-serve, and from their values to a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dsbd_ort.commands.number_types import (
    BYTES,
    COUNT,
    COUNT_OR_NONE,
    SECONDS,
    SECONDS_OR_NONE,
    WHOLE_SECONDS,
)
from dsbd_ort.commands.serve import ServeRequest, run
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.pipeline_settings import PipelineSettings

_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True),
    click.option("--model-name", help="What requests call the model [the bundle's folder]."),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        help="Text file, one key a line; without it everybody may ask.",
    ),
    click.option(
        "--keys-everywhere", is_flag=True, help="/health, /ready and /metrics want a key too."
    ),
    click.option(
        "--max-requests",
        type=COUNT,
        default=8,
        show_default=True,
        help="That share the engine at a time.",
    ),
    click.option(
        "--max-queued",
        type=COUNT_OR_NONE,
        default=64,
        show_default=True,
        help="That wait beyond those; one more gets a 429.",
    ),
    click.option("--kv-bytes", type=BYTES, help="Most bytes of both engines' caches."),
    click.option("--max-prompt-tokens", type=COUNT, help="Of one prompt [what the context holds]."),
    click.option("--max-new-tokens", type=COUNT, default=4096, show_default=True),
    click.option("--max-beams", type=COUNT, default=16, show_default=True),
    click.option(
        "--max-draft-nodes",
        type=COUNT,
        default=256,
        show_default=True,
        help="Candidates of one drafted forest.",
    ),
    click.option("--max-best-of", type=COUNT, default=16, show_default=True, help="n and best_of."),
    click.option("--max-prompts", type=COUNT, default=16, show_default=True, help="Of one body."),
    click.option("--max-body-bytes", type=BYTES, default=2**20, show_default=True),
    click.option(
        "--body-timeout",
        "body_timeout_s",
        type=SECONDS,
        default=10.0,
        show_default=True,
        help="Seconds for a body to arrive.",
    ),
    click.option(
        "--request-timeout",
        "request_timeout_s",
        type=SECONDS,
        default=600.0,
        show_default=True,
        help="Seconds for a whole request, the queue included.",
    ),
    click.option(
        "--idle-timeout",
        "idle_timeout_s",
        type=WHOLE_SECONDS,
        default=10,
        show_default=True,
        help="Seconds for a connection to begin a request.",
    ),
    click.option(
        "--stuck-timeout",
        "stuck_timeout_s",
        type=SECONDS,
        default=60.0,
        show_default=True,
        help="Seconds after which a client that takes nothing of an answer is dropped.",
    ),
    click.option(
        "--shutdown-timeout",
        "shutdown_timeout_s",
        type=SECONDS_OR_NONE,
        default=30.0,
        show_default=True,
        help="Seconds for requests to finish after SIGTERM.",
    ),
    click.option(
        "--max-connections",
        type=COUNT,
        default=512,
        show_default=True,
        help="Open at a time; one more gets a 503.",
    ),
    click.option("--no-access-log", is_flag=True, help="Do not log requests."),
)


def serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that are dsbd-serve's alone."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def serve_from_arguments(
    *,
    bundle: Path,
    provider: str,
    draft_provider: str | None,
    threads: int | None,
    cuda_graphs: bool,
    verify: bool,
    no_prefix_cache: bool,
    model_name: str | None,
    max_requests: int,
    max_queued: int,
    kv_bytes: int | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    idle_timeout_s: int,
    stuck_timeout_s: float,
    shutdown_timeout_s: float,
    max_connections: int,
    no_access_log: bool,
    **settings: Any,
) -> None:
    """Serve; ``settings`` are the fields of ServingSettings that are left."""
    run(
        ServeRequest(
            pipeline=PipelineSettings(
                bundle=bundle,
                provider=provider,
                draft_provider=draft_provider,
                num_threads=threads,
                cuda_graphs=cuda_graphs,
                verify=verify,
                prefix_cache=not no_prefix_cache,
            ),
            limits=ServiceLimits(
                max_requests=max_requests, max_queued=max_queued, kv_bytes=kv_bytes
            ),
            settings={"model_name": model_name or bundle.resolve().name, **settings},
            api_key_file=api_key_file,
            host=host,
            port=port,
            idle_timeout_s=idle_timeout_s,
            stuck_timeout_s=stuck_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
            max_connections=max_connections,
            logs_access=not no_access_log,
        )
    )
