"""Who is inside, and whether more may come in: what a graceful end asks."""

from __future__ import annotations

from dsbd_ort.openai_server.errors import draining


class Gate:
    """Counts the requests that are being answered; closes for new ones. For one event loop."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.is_draining = False

    def enter(self) -> None:
        """Let a request in.

        Raises:
            Refusal: the server is about to end.
        """
        if self.is_draining:
            raise draining()
        self.num_inside += 1

    def leave(self) -> None:
        """Let a request out."""
        self.num_inside -= 1

    def drain(self) -> None:
        """Let nobody in any more."""
        self.is_draining = True
