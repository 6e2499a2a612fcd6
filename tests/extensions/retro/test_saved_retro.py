"""`--use-checkpoint-args` on a checkpoint of a Retro."""

from dataclasses import asdict

import pytest
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.manifest import Manifest, write_manifest
from megatron.checkpointing.saved_run import checkpoint_flags
from megatron.checkpointing.train_state import TrainState
from megatron.config.config import parse_config
from megatron.extensions.retro.flags import RetroConfig

USES = ["--micro-batch-size", "2", "--lr", "0.1", "--train-iters", "10", "--data-path", "corpus"]


@pytest.mark.parametrize(("neighbors", "sections"), [(2, ()), (5, ("retro",))])
def test_its_flags_are_read_where_they_decide_something(tmp_path, neighbors, sections):
    own = asdict(RetroConfig(retro_num_neighbors=neighbors))
    config = {**asdict(tiny_config()), "extensions": {"retro": own}}
    (tmp_path / "global_step1").mkdir()
    manifest = Manifest(
        state=TrainState(),
        plan=tiny_plan().to_dict(),
        config=config,
        versions={},
        partition_dims={},
        files=(),
    )
    write_manifest(tmp_path / "global_step1", manifest)
    argv = [*USES, "--use-checkpoint-args", "--load", str(tmp_path)]
    network = checkpoint_flags(argv)
    assert network.sections == sections
    config, _ = parse_config(argv, defaults=network.flags, saved_sections=network.sections)
    assert [*config.extensions][:1] == [*sections]
    assert config.section(RetroConfig).retro_num_neighbors == neighbors
