"""What all tests share; tests/ itself is on the import path because this file is in it."""

import gc
import logging
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from ended_groups import open_groups
from hypothesis import HealthCheck, settings

from megatron.tensor_parallel.process_groups import lone_group

# Tensors here are tiny; more threads would only wait for each other.
torch.set_num_threads(1)

# Shells have background jobs ignore these, and children inherit that; tests of signals mean those of
# a job in the foreground.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# The same code gets the same answer: examples are those of a test's source, until others are requested
# for by `pytest --hypothesis-profile=default`. How long one takes says nothing on a machine that
# does other work too.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """Keep what is imported out of searches for garbage, which take longer than most tests."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Variables that a module's tests leave behind would tell the next one's jobs a rank."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def log_handlers():
    """A command that a test calls logs to the stdout of that test, which is closed afterwards."""
    logger = logging.getLogger("megatron")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture(autouse=True)
def draws():
    """A test draws the same whichever tests its process ran before, which differs with their pace.

    It also rounds the same: loading a model sets the number of threads, on which the order depends
    in which gradients are summed.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)  # also for what the next module prepares


@pytest.fixture(autouse=True)
def threads():
    """Each process group holds three threads; a test's own end with it, lest thousands gather.

    Those stay that DeepSpeed keeps for its next engine.
    """
    before = set(open_groups())
    yield
    deepspeed = sys.modules.get("deepspeed.utils.groups")
    kept = list(vars(deepspeed).values()) if deepspeed else []
    kept += [one for several in kept if isinstance(several, dict) for one in several.values()]
    for made in (
        set(open_groups()) - before - {one for one in kept if isinstance(one, dist.ProcessGroup)}
    ):
        dist.destroy_process_group(made)


@pytest.fixture(scope="session")
def group():
    """A process group of this process alone."""
    yield lone_group()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def store():
    """An S3 server of the module's own, and the proxy before it; see `object_store`."""
    from object_store import object_store

    with object_store() as running:
        yield running
