"""dsbd-serve: open a bundle and answer OpenAI's HTTP interface."""

from __future__ import annotations

import ipaddress
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.pipeline_settings import PipelineSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """What the command line asked for.

    Attributes:
        pipeline: how to open the bundle.
        limits: how many requests share the engine.
        settings: fields of ServingSettings but for the keys.
        api_key_file: one key a line; None lets everybody ask.
        host, port: where to listen; port 0 takes any that is free.
        idle_timeout_s: for a connection to begin a request.
        stuck_timeout_s: for a client to take what was sent.
        shutdown_timeout_s: for requests to finish after a signal.
        max_connections: open at a time.
        logs_access: whether every request is a line of the log.
    """

    pipeline: PipelineSettings
    limits: ServiceLimits
    settings: dict[str, Any]
    api_key_file: Path | None
    host: str
    port: int
    idle_timeout_s: int
    stuck_timeout_s: float
    shutdown_timeout_s: float
    max_connections: int
    logs_access: bool


def run(request: ServeRequest) -> None:
    """Serve until SIGTERM or Ctrl-C; logs go to stderr.

    Raises:
        click.ClickException: the packages of the server are not installed.
    """
    try:  # here, not at the top: they are an extra
        from dsbd_ort.openai_server.api_keys import read_api_keys
        from dsbd_ort.openai_server.app import create_app
        from dsbd_ort.openai_server.generation import Gate
        from dsbd_ort.openai_server.server import GracefulServer, listening_socket
        from dsbd_ort.openai_server.settings import ServingSettings
    except ImportError as error:
        raise click.ClickException(
            f"the server needs a package that is not installed ({error.name}); "
            "run: pip install 'dsbd-ort[serve]'"
        ) from error
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    keys = None if request.api_key_file is None else read_api_keys(request.api_key_file)
    if keys is None and not is_loopback(request.host):
        _log.warning(
            "%s can be reached from elsewhere and everybody may ask; give --api-key-file",
            request.host,
        )
    settings = ServingSettings(keys=keys, **request.settings)
    listener = listening_socket(request.host, request.port, stuck_after_s=request.stuck_timeout_s)
    with (
        listener,
        request.pipeline.open() as pipeline,
        Service(pipeline, request.limits) as service,
    ):
        gate = Gate()
        server = GracefulServer(
            create_app(service, settings, gate=gate, logs_access=request.logs_access),
            service,
            gate,
            idle_timeout_s=request.idle_timeout_s,
            shutdown_timeout_s=request.shutdown_timeout_s,
            max_connections=request.max_connections,
        )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        server.run_on(
            listener,
            when_listening=lambda: _log.info(
                "serving %s at http://%s:%d/v1", settings.model_name, shown, port
            ),
        )


def is_loopback(host: str) -> bool:
    """Tell whether a host is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
