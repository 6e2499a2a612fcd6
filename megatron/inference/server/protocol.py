"""HTTP/1.1 connections with a time limit for the headers of a request."""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """Closes a connection on which a request's headers do not arrive within `headers_s`.

    uvicorn has a limit between requests alone: without this one, clients that send half of the
    headers keep their connections for ever.
    """

    headers_s: ClassVar[float]

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._headers_task: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first headers."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle data; headers that have begun must come to their end."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._headers_task is None:
            self._headers_task = self.loop.call_later(self.headers_s, self.transport.close)

    def _unwatch(self) -> None:
        if self._headers_task is not None:
            self._headers_task.cancel()
            self._headers_task = None


def protocol_with_limit(headers_s: float) -> type[TimedProtocol]:
    """Return the protocol class of connections whose headers take at most so many seconds."""
    return type("LimitedProtocol", (TimedProtocol,), {"headers_s": headers_s})
