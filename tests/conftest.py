"""What all tests share; tests/ itself is on the import path because this file is in it."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from megatron.parallel.groups import lone_group

# Tensors here are tiny; more threads would only wait for each other.
torch.set_num_threads(1)

# How long an example takes says nothing on a machine that does other work too.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Variables that a module's tests leave behind would tell the next one's jobs a rank."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def group():
    """A process group of this process alone."""
    yield lone_group()
    dist.destroy_process_group()
