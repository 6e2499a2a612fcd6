"""Which signals end the server."""

import signal
from types import SimpleNamespace

import pytest

from megatron.serving.server import Server


@pytest.mark.parametrize("ignores", [True, False])
def test_an_interrupt_that_was_ignored_at_the_start_does_not_stop_the_server(ignores):
    server, stopped = object.__new__(Server), []
    server.engine_loop = SimpleNamespace(is_open=True)
    server.stop = lambda: stopped.append(True)
    server._ignores_interrupts = ignores
    server.handle_exit(signal.SIGINT, None)
    assert stopped == ([] if ignores else [True])
    server.handle_exit(signal.SIGTERM, None)
    assert stopped
