"""A server on a free port, in a thread of the tests' process."""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
import openai
import pytest
from starlette.types import ASGIApp

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.openai_server.app import create_app
from dsbd_ort.openai_server.generation import Gate
from dsbd_ort.openai_server.server import GracefulServer, listening_socket
from dsbd_ort.openai_server.settings import ServingSettings

MODEL = "tiny"


@dataclass(frozen=True)
class RunningServer:
    """Address of a server, and a client for it.

    http: a client to be shared; to make one takes longer than a request, for certificates.
    terminate: does what SIGTERM would do.
    """

    port: int
    service: Service
    gate: Gate
    http: httpx2.Client
    terminate: Callable[[], None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)


@contextlib.contextmanager
def running_server(
    service: Service,
    *,
    idle_timeout_s: int = 10,
    stuck_after_s: float = 60,
    shutdown_timeout_s: float = 5,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve until the end of the block; the service is closed then.

    around: wraps the application.
    """
    gate, is_listening = Gate(), threading.Event()
    with listening_socket("127.0.0.1", 0, stuck_after_s=stuck_after_s) as listener:
        server = GracefulServer(
            around(create_app(service, ServingSettings(model_name=MODEL, **settings), gate=gate)),
            service,
            gate,
            idle_timeout_s=idle_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
            max_connections=64,
        )
        thread = threading.Thread(
            target=server.run_on, args=(listener,), kwargs={"when_listening": is_listening.set}
        )
        thread.start()
        assert is_listening.wait(10)
        port = listener.getsockname()[1]
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                terminate = functools.partial(server.handle_exit, signal.SIGTERM, None)
                yield RunningServer(port, service, gate, http, terminate)
        finally:
            gate.drain()
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def served_bundle(
    bundle: Path, limits: ServiceLimits | None = None, **settings: Any
) -> Iterator[RunningServer]:
    """Serve a bundle until the end of the block; ``settings``: of ``running_server``."""
    with (
        Pipeline.from_bundle(bundle, num_threads=1) as opened,
        Service(opened, limits) as service,
        running_server(service, **settings) as server,
    ):
        yield server


@contextlib.contextmanager
def client_of(bundle: Path, **settings: Any) -> Iterator[openai.OpenAI]:
    """Serve a bundle; return a client that waits for models that read sounds or pictures."""
    with (
        served_bundle(bundle, **settings) as server,
        server.client().with_options(timeout=300) as client,
    ):
        yield client


def refused(call: Any, **arguments: Any) -> dict[str, Any]:
    """Return the error of a call of the client that is refused in one line."""
    with pytest.raises(openai.BadRequestError) as raised:
        call(model=MODEL, **arguments)
    error = cast(dict[str, Any], raised.value.body)
    assert "\n" not in error["message"]
    return error
