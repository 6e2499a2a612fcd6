"""Exports of small checkpoints."""

import pytest
from architectures import SIZES, tool
from checkpoints import spread_network, write_checkpoint
from tiny import tiny_plan

from megatron.checkpointing.conversion.network import weights_of


@pytest.fixture
def exported(group, tmp_path):
    """Return a function from flags to a network, its checkpoint and the folder of transformers'."""

    def export(flags, *words):
        flags = [*SIZES.split(), *flags.split()]
        plan = tiny_plan(*flags, world_size=4)
        model = spread_network(plan.model, group)
        weights = {name: w.detach() for name, w in weights_of(model).items()}
        saved = write_checkpoint(tmp_path / "saved", weights, *flags)
        tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf", *words)
        return plan.model, model, saved

    return export
