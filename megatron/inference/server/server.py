"""An application on a port, until a signal ends it in good order."""

import logging
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from megatron.common.errors import ConfigError, MegatronError, reason
from megatron.inference.server.engine_thread import EngineLoop
from megatron.inference.server.protocol import protocol_with_limit
from megatron.training.process.launchers import Launchers

log = logging.getLogger(__name__)

_AFTER_GRACE_S = 5
"""Seconds in which the last answers are written."""


_LAST_STEP_S = 60.0
"""Seconds that the step under way may take when the time of the requests is over."""


class ServingError(MegatronError):
    """The engine has failed while it served, or does not end."""


class Server(uvicorn.Server):
    """Serves `app`; SIGTERM and SIGINT let requests under way end within `grace_s`.

    Until they have ended, connections are accepted and answered with 503, so that load balancers
    see the state in /health.

    Args:
        headers_s: seconds within which the headers of a request must arrive.
        engine_loop: what the application gives work; it is started and closed here.
        launchers: when one of them ends, the server does too: nobody else would end it.
        last_step_s: an engine that has not ended so long after `grace_s` is left as it is.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine_loop: EngineLoop,
        *,
        host: str,
        port: int,
        grace_s: float,
        headers_s: float,
        launchers: Launchers | None = None,
        last_step_s: float = _LAST_STEP_S,
    ):
        self.engine_loop, self.grace_s, self.last_step_s = engine_loop, grace_s, last_step_s
        self.launchers = launchers or Launchers(is_parent=False)
        self._ignores_interrupts = False
        engine_loop.on_failure = self.stop
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
        """Take no more requests, and exit when those under way have ended."""
        self.engine_loop.drain(self.grace_s)

    async def on_tick(self, counter: int) -> bool:
        """Look after the engine, and once a second after the launchers; ticks are 0.1 s apart."""
        if self.engine_loop.is_open:
            if counter % 10 == 0 and self.launchers.are_gone():
                log.warning("a launcher has ended, and so does the server")
                self.stop()
        elif self.engine_loop.has_ended() or self.engine_loop.is_hung(self.last_step_s):
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down; a second Ctrl-C does not wait for requests under way."""
        if sig == signal.SIGINT and self._ignores_interrupts:
            return
        if self.engine_loop.is_open:
            self.stop()
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def serve_until_stopped(self) -> None:
        """Answer until a signal comes.

        Raises:
            ServingError: the engine has failed, or hangs and does not end.
        """
        # As shells have it for background jobs; uvicorn listens all the same.
        self._ignores_interrupts = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        # Until uvicorn sets the same, and when it has ended: the program should go on to its end.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        self.engine_loop.start()
        host, port, *_ = self.listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        log.info("serving at http://%s:%d", shown, port)
        try:
            self.run(sockets=[self.listener])
        finally:
            self.engine_loop.close(self.last_step_s)
        if self.engine_loop.is_hung(self.last_step_s):
            raise ServingError(
                f"the engine hangs: its step has not ended {self.last_step_s:g} s after the "
                f"requests under way were given up; it is in {self.engine_loop.place}"
            )
        if self.engine_loop.failure is not None:
            raise ServingError(f"the engine has failed: {self.engine_loop.failure}")
        log.info("all requests have ended")


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be bound: {reason(error)}; give others"
        ) from error
    # A token must not wait in the system for more to be sent with it.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found
