"""Which signals end the server."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from problems import problem

from megatron.common.errors import ExitCode
from megatron.inference.server.engine_thread import EngineThread
from megatron.inference.server.server import Server, ServingError


@pytest.fixture
def handlers():
    """The handlers of the signals are afterwards what they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def silent(scope, receive, send):
    """Answer nothing."""


class StuckEngine:
    """An engine whose step sends `signals`, and ends when `resume` is set."""

    rows, is_busy, runner = 1, False, SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, *signals):
        self.resume, self.signals = threading.Event(), signals

    def add(self, request):
        return 0

    def step(self):
        for number in self.signals:
            os.kill(os.getpid(), number)
        self.resume.wait()
        return []

    def close(self):
        pass


@pytest.mark.parametrize("ignores", [True, False])
def test_an_interrupt_that_was_ignored_at_the_start_does_not_stop_the_server(ignores):
    server, stopped = object.__new__(Server), []
    server.engine_thread = SimpleNamespace(is_open=True)
    server.stop = lambda: stopped.append(True)
    server.ignores_interrupts = ignores
    server.handle_exit(signal.SIGINT, None)
    assert stopped == ([] if ignores else [True])
    server.handle_exit(signal.SIGTERM, None)
    assert stopped


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]], ids=str)
def test_a_step_that_hangs_does_not_keep_the_server(handlers, signals):
    engine, answers = StuckEngine(*signals), []
    loop = EngineThread(engine, queue=1)
    server = Server(
        silent,
        loop,
        host="127.0.0.1",
        port=0,
        grace_s=0.1,
        headers_s=1,
        last_step_s=0.1,
    )
    loop.submit(
        [SimpleNamespace(prompt=[1], contexts=())], lambda index, event: answers.append(event)
    )
    try:
        with problem("engine hangs … in wait (tests/", ServingError) as caught:
            server.serve_until_stopped()
        assert caught.value.exit_code == ExitCode.FAILED
        assert loop.is_hung(0.1)
    finally:
        engine.resume.set()
        loop.close()
    assert len(answers) == 1
    assert not loop.is_hung(0)
