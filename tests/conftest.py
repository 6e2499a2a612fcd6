"""What all tests share; tests/ itself is on the import path because this file is in it."""

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


@pytest.fixture(scope="session")
def group():
    """A process group of this process alone."""
    yield lone_group()
    dist.destroy_process_group()
