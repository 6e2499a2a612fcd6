"""HTTP server (uvicorn): header time limit, listening socket, and graceful shutdown on signals."""

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.common.errors import ConfigError, MegatronError, reason
from megatron.inference.server.engine_thread import EngineThread
from megatron.training.process.launchers import Launchers

log = logging.getLogger(__name__)

_AFTER_GRACE_S = 5
"""Seconds in which the last responses are written."""

_LAST_STEP_S = 60.0
"""Seconds that the current engine step may take after the grace time."""


class ServingError(MegatronError):
    """The engine has failed, or hangs at the shutdown."""


class TimedProtocol(H11Protocol):
    """HTTP/1.1 connection that is closed if a request's headers do not arrive within `headers_s`.

    uvicorn limits the time between requests only: clients that send half of the headers would keep
    their connections open forever.
    """

    headers_s: ClassVar[float]

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first headers."""
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        """Handle data; start the timer when a request's headers are incomplete."""
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.headers_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_with_limit(headers_s: float) -> type[TimedProtocol]:
    """Return the protocol class with a time limit for headers."""
    return type("LimitedProtocol", (TimedProtocol,), {"headers_s": headers_s})


class Server(uvicorn.Server):
    """Serves `app`; after SIGTERM or SIGINT, running requests get `grace_s` to finish.

    Until then, connections are accepted and answered with 503, so that load balancers see the
    state in /health.

    Args:
        headers_s: seconds within which the headers of a request must arrive.
        engine_thread: started and closed here.
        launchers: the server ends when one of them has ended, as nothing else would end it.
        last_step_s: seconds after `grace_s` after which a running engine step counts as hung.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine_thread: EngineThread,
        *,
        host: str,
        port: int,
        grace_s: float,
        headers_s: float,
        launchers: Launchers | None = None,
        last_step_s: float = _LAST_STEP_S,
    ):
        self.engine_thread, self.grace_s, self.last_step_s = engine_thread, grace_s, last_step_s
        self.launchers = launchers or Launchers(is_parent=False)
        self.ignores_interrupts = False
        engine_thread.on_failure = self.stop
        self.listener = listener(host, port)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_with_limit(headers_s),
                log_level="warning",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_AFTER_GRACE_S,
            )
        )

    def stop(self) -> None:
        """Refuse further requests, and exit when the running ones have finished."""
        self.engine_thread.drain(self.grace_s)

    async def on_tick(self, counter: int) -> bool:
        """Check the engine, and once a second the launchers; ticks are 0.1 s apart."""
        if self.engine_thread.is_open:
            if counter % 10 == 0 and self.launchers.are_gone():
                log.warning("a launcher has ended: the server shuts down")
                self.stop()
        elif self.engine_thread.has_ended() or self.engine_thread.is_hung(self.last_step_s):
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down; a second Ctrl-C does not wait for running requests."""
        if sig == signal.SIGINT and self.ignores_interrupts:
            return
        if self.engine_thread.is_open:
            self.stop()
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def serve_until_stopped(self) -> None:
        """Serve until a signal.

        Raises:
            ServingError: the engine has failed, or hangs and does not end.
        """
        # Shells ignore SIGINT in background jobs; uvicorn would handle it all the same.
        self.ignores_interrupts = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        # Before uvicorn sets its handlers and after it has removed them: the program must end normally.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        self.engine_thread.start()
        host, port, *_ = self.listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        log.info("serving at http://%s:%d", shown, port)
        try:
            self.run(sockets=[self.listener])
        finally:
            self.engine_thread.close(self.last_step_s)
        if self.engine_thread.is_hung(self.last_step_s):
            raise ServingError(
                f"the engine hangs: its step has not ended {self.last_step_s:g} s after the running "
                f"requests were dropped; it is in {self.engine_thread.current_function}"
            )
        if self.engine_thread.failure is not None:
            raise ServingError(f"the engine has failed: {self.engine_thread.failure}")
        log.info("all requests have ended")


def listener(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be bound: {reason(error)}; choose another --port"
        ) from error
    # Send each token at once instead of collecting a full packet (Nagle's algorithm).
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found
