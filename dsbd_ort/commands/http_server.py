"""Starts the server of dsbd-serve; needs the packages of the extra ``serve``."""

import ipaddress
import logging
import sys

from dsbd_ort.commands.serve_arguments import ServeArguments
from dsbd_ort.engine import Service
from dsbd_ort.openai_server.app import create_app
from dsbd_ort.openai_server.generation import Gate
from dsbd_ort.openai_server.middleware import read_api_keys
from dsbd_ort.openai_server.server import GracefulServer, listening_socket
from dsbd_ort.openai_server.settings import ServingSettings

_log = logging.getLogger(__name__)


def serve(arguments: ServeArguments) -> None:
    """Serve until SIGTERM or Ctrl-C; logs go to stderr."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of malformed bodies
    settings = _settings(arguments)
    listener = listening_socket(
        arguments.host, arguments.port, stuck_after_s=arguments.stuck_timeout_s
    )
    with (
        listener,
        arguments.pipeline.open() as pipeline,
        Service(pipeline, arguments.limits) as service,
    ):
        gate = Gate()
        server = GracefulServer(
            create_app(service, settings, gate=gate, logs_access=arguments.logs_access),
            service,
            gate,
            idle_timeout_s=arguments.idle_timeout_s,
            shutdown_timeout_s=arguments.shutdown_timeout_s,
            max_connections=arguments.max_connections,
        )
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        server.run_on(
            listener,
            when_listening=lambda: _log.info("serving %s at %s", settings.model_name, url),
        )


def _settings(arguments: ServeArguments) -> ServingSettings:
    """Return the settings; warn if other machines can use the server without a key."""
    keys = None if arguments.api_key_file is None else read_api_keys(arguments.api_key_file)
    if keys is None and not is_loopback(arguments.host):
        _log.warning(
            "%s can be reached from other machines and no API key is required; give --api-key-file",
            arguments.host,
        )
    model_name = arguments.model_name or arguments.pipeline.bundle.resolve().name
    return ServingSettings(
        model_name=model_name, keys=keys, defaults=arguments.options, **arguments.settings
    )


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
