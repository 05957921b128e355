"""uvicorn, with an end that lets those inside finish."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from dsbd_ort.number_checks import MOST_SECONDS, check_count, check_seconds
from dsbd_ort.openai_server.engine_service import EngineService
from dsbd_ort.openai_server.gate import Gate
from dsbd_ort.openai_server.timed_protocol import TimedProtocol

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 2  # for answers that were cut short to reach their clients


class GracefulServer(uvicorn.Server):
    """Ends in order: the first signal closes the gate, a second one does not wait.

    While those inside finish, the server still listens, so that /ready can say 503. After
    ``shutdown_timeout_s`` their requests are cancelled, and told so.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: EngineService,
        gate: Gate,
        *,
        idle_timeout_s: int,
        shutdown_timeout_s: float,
        max_connections: int,
    ) -> None:
        check_count("idle_timeout_s", idle_timeout_s, 1, MOST_SECONDS)
        check_seconds("shutdown_timeout_s", shutdown_timeout_s, may_be_zero=True)
        check_count("max_connections", max_connections, 1)
        super().__init__(
            uvicorn.Config(
                app,
                http=TimedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=idle_timeout_s,
                timeout_graceful_shutdown=_LAST_WORDS_S,
                limit_concurrency=max_connections,
            )
        )
        self._service = service
        self._gate = gate
        self._shutdown_timeout_s = shutdown_timeout_s
        self._deadline: float | None = None
        self._when_listening: Callable[[], None] = lambda: None

    def run_on(self, listener: socket.socket, *, when_listening: Callable[[], None]) -> None:
        """Serve until a signal, then end in order."""
        self._when_listening = when_listening
        self.run(sockets=[listener])
        self._service.close(drain=False)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; signals are heard from here on."""
        await super().startup(sockets)
        self._when_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._gate.is_draining:
            self.should_exit = self.force_exit = True
        self._gate.drain()

    async def on_tick(self, counter: int) -> bool:
        """Look ten times a second whether it is time to end."""
        if self._gate.is_draining:
            now = asyncio.get_running_loop().time()
            if self._deadline is None:
                self._deadline = now + self._shutdown_timeout_s
                _log.info("ending; %d requests are being answered", self._gate.num_inside)
            if self._gate.num_inside == 0:
                self.should_exit = True
            elif now >= self._deadline:
                _log.warning("%d requests are cut short", self._gate.num_inside)
                await asyncio.to_thread(self._service.close, drain=False)
                self.should_exit = True
        return await super().on_tick(counter)
