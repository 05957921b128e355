"""Bodies of a client's requests, recorded before the application reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Recorder:
    """An ASGI application around another.

    Attributes:
        bodies: of POST requests, by path.
        statuses: of all responses.
    """

    app: ASGIApp | None = None
    bodies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)

    def around(self, app: ASGIApp) -> Recorder:
        self.app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        chunks: list[bytes] = []

        async def recorded() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                chunks.append(message.get("body", b""))
                if not message.get("more_body") and scope["method"] == "POST":
                    self.bodies.setdefault(scope["path"], []).append(json.loads(b"".join(chunks)))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
            await send(message)

        await self.app(scope, recorded, sent)

    @property
    def fields(self) -> set[str]:
        """The names of all fields that were sent."""
        return {name for bodies in self.bodies.values() for body in bodies for name in body}
