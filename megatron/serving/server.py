"""An application on a port, until a signal ends it in good order."""

import logging
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from megatron.errors import ConfigError, MegatronError, reason
from megatron.serving.engine_loop import EngineLoop
from megatron.training.launchers import Launchers

log = logging.getLogger(__name__)

_AFTER_GRACE_S = 5
"""In which the answers to what was dropped are written."""


class ServingError(MegatronError):
    """The engine has failed while it served."""


class Server(uvicorn.Server):
    """Serves `app`; SIGTERM and SIGINT let requests under way end within `grace_s`.

    Args:
        engine_loop: what the application gives work; it is started and closed here.
        launchers: when one of them ends, the server does too: nobody else would end it.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine_loop: EngineLoop,
        *,
        host: str,
        port: int,
        grace_s: float,
        launchers: Launchers | None = None,
    ):
        self.engine_loop, self.grace_s = engine_loop, grace_s
        self.launchers = launchers or Launchers(is_parent=False)
        engine_loop.on_failure = self.stop
        self.listener = listener(host, port)
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=int(grace_s) + _AFTER_GRACE_S,
            )
        )

    def stop(self) -> None:
        """Begin the end."""
        self.should_exit = True
        self.engine_loop.drain(self.grace_s)

    async def on_tick(self, counter: int) -> bool:
        """Look after the launchers once a second; a tick is a tenth of one."""
        if counter % 10 == 0 and not self.should_exit and self.launchers.are_gone():
            log.warning("a launcher has ended, and so does the server")
            self.stop()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end; a second Ctrl-C does not wait for it."""
        self.engine_loop.drain(self.grace_s)
        super().handle_exit(sig, frame)

    def serve_until_stopped(self) -> None:
        """Answer until a signal comes.

        Raises:
            ServingError: the engine has failed.
        """
        # uvicorn repeats the signal when it has ended: the program should go on to its end.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda signum, frame: None)
        self.engine_loop.start()
        host, port, *_ = self.listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        log.info("serving at http://%s:%d", shown, port)
        try:
            self.run(sockets=[self.listener])
        finally:
            self.engine_loop.close()
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
