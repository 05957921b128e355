"""Work for a client that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from dsbd_ort.openai_server.refusal import Refusal

T = TypeVar("T")


async def while_present(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; give it up when the client has gone.

    ``receive`` is that of a request whose body was read.

    Raises:
        Refusal: the client has gone. Nobody reads the answer; the log shows its status.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Refusal(499, "the client has gone")
    finally:
        working.cancel()
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
