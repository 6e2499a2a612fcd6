"""A run whose engine writes one small file."""

import pytest
from tiny import tiny_config, tiny_plan
from torch import nn

from megatron.checkpointing.train_state import TrainState
from megatron.tensor_parallel.sharding import mark_sharded
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import resume
from megatron.training.checkpoints.save import Checkpoints


class FakeEngine:
    """One sharded weight; records its loads and their options."""

    def __init__(self, group):
        self.module = nn.Linear(2, 2)
        mark_sharded(self.module.weight, 1, group)
        self.loaded = []

    def partition_dims(self):
        return {"weight": 1}

    def save(self, directory, tag, client_state, *, optimizer, streams, write):
        self.saved = {"optimizer": optimizer, "streams": streams}
        (directory / tag).mkdir(exist_ok=True)
        write(self.module.state_dict(), directory / tag / "weights.pt")
        (directory / tag / "more.txt").write_text(str(client_state))

    def load(self, directory, tag, *, read, optimizer, streams):
        self.loaded.append((directory, tag))
        self.parts = {"optimizer": optimizer, "streams": streams}


@pytest.fixture
def job(tmp_path, group):
    """A run that saves to and loads from one directory, every 5 iterations."""

    class Job:
        directory = tmp_path / "runs"
        flags = ["--save", str(directory), "--save-interval", "5", "--load", str(directory)]

        def __init__(self):
            self.engine = FakeEngine(group)
            self.plan = tiny_plan(*self.flags)
            self.config = tiny_config(*self.flags)
            self.checkpoints = Checkpoints(self.engine, self.plan, self.config)

        def save(self, iteration):
            self.checkpoints.save(TrainState(iteration=iteration, samples=2 * iteration))

        def resume(self, *flags):
            state = TrainState()
            plan = tiny_plan(*self.flags, *flags)
            if chosen := choose_checkpoint(plan):
                resume(self.engine, plan, state, chosen)
            return state

    return Job()
