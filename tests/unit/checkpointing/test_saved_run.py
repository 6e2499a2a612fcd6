"""`--use-checkpoint-args`: flags saved in a checkpoint."""

from dataclasses import asdict, dataclass, replace

import pytest
from problems import problem
from tiny import tiny_argv, tiny_config, tiny_plan

from megatron.checkpointing.manifest import Manifest, write_manifest
from megatron.checkpointing.saved_run import checkpoint_flags, read_saved_run, saved_progress
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.config.config import parse_config
from megatron.config.network.model_spec import flat

FLAGS = [
    *("--swiglu", "--num-layers", "3", "--hidden-dropout", "0.2", "--vocab-file", "v.json"),
    *("--position-embedding-type", "rotary", "--mtp-num-layers", "1"),
]
USES = ["--micro-batch-size", "2", "--lr", "0.1", "--train-iters", "10", "--data-path", "corpus"]


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints; the older one is of another network."""
    for step, flags in ((2, ["--num-layers", "5"]), (4, FLAGS)):
        folder = tmp_path / f"global_step{step}"
        folder.mkdir()
        manifest = Manifest(
            state=TrainState(iteration=step, samples=8 * step),
            plan=tiny_plan(*flags).to_dict(),
            config=asdict(tiny_config(*flags)),
            versions={},
            partition_dims={},
            files=(),
        )
        write_manifest(folder, manifest)
    return tmp_path


def parsed(*flags):
    argv = [*USES, *flags]
    network = checkpoint_flags(argv)
    config, _ = parse_config(argv, defaults=network.flags)
    return config, network.describe(config)


@pytest.mark.parametrize("option", ["--use-checkpoint-args", "--use-checkpoint-config"])
def test_network_and_tokenizer_are_those_of_the_checkpoint(saved, option):
    config, (line,) = parsed(option, "--load", str(saved))
    expected = tiny_config(*FLAGS)
    assert (config.model, config.experts, config.tokenizer) == (
        *(expected.model, expected.experts, expected.tokenizer),
    )
    assert config.prediction == expected.prediction
    assert config.training == tiny_config().training
    assert line.startswith(f"settings from {saved / 'global_step4'}: ")
    assert {"--num-layers 3", "--swiglu"} <= {
        f"--{words.strip()}" for words in line.split(": ")[1].split("--")
    }


def test_flags_of_the_command_line_win_and_are_logged(saved):
    config, (_, line) = parsed(
        "--use-checkpoint-args", "--load", str(saved), "--hidden-dropout", "0"
    )
    assert (config.model.hidden_dropout, config.model.num_layers) == (0.0, 3)
    assert line.endswith("global_step4: --hidden-dropout 0.0 (not 0.2)")


def test_ckpt_step_and_config_files_are_read(saved, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"use-checkpoint-args: true\nload: {saved}\nckpt-step: 2\n")
    config, _ = parsed("--config", str(file))
    assert config.model.num_layers == 5


def test_nothing_is_taken_without_the_flag_or_a_checkpoint(saved, tmp_path):
    assert checkpoint_flags(tiny_argv("--load", str(saved))) is None
    assert checkpoint_flags(["--use-checkpoint-args", "--load", str(tmp_path / "no")]) is None
    with problem("--ckpt-step x"):
        checkpoint_flags(["--use-checkpoint-args", f"--load={saved}", "--ckpt-step", "x"])


def test_finetuning_takes_the_network_where_no_size_is_given(saved):
    for flags, objective in ((["--finetune"], "gpt"), ([], "sft")):
        network = checkpoint_flags(["--load", str(saved), *flags], objective)
        assert network.flags["num_layers"] == 3
        assert checkpoint_flags([*tiny_argv("--load", str(saved)), *flags], objective) is None


def test_the_flags_of_a_plugins_part_of_the_network_are_taken(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class SteepConfig:
        steep: float = 1.5

    folder = tmp_path / "global_step1"
    folder.mkdir()
    plan = flat(replace(tiny_plan().model, own_flags=(("steep", 2.0),)))
    empty = {"config": {}, "versions": {}, "partition_dims": {}, "files": ()}
    write_manifest(folder, Manifest(state=TrainState(iteration=1), plan={"model": plan}, **empty))
    network = checkpoint_flags(["--use-checkpoint-args", "--load", str(tmp_path)])
    assert network.flags == {"steep": 2.0}
    config = replace(tiny_config(), extensions={"SteepConfig": SteepConfig(steep=2.0)})
    assert network.describe(config)[0].endswith(": --steep 2.0")


def test_a_damaged_manifest_is_passed_over_and_none_is_an_error(saved):
    for step in (4, 2):
        (saved / f"global_step{step}" / "manifest.json").write_text("{")
        if step == 4:
            config, _ = parsed("--use-checkpoint-args", "--load", str(saved))
            assert config.model.num_layers == 5
    with problem("global_step4 … global_step2", CheckpointError):
        parsed("--use-checkpoint-args", "--load", str(saved))


def test_the_world_size_of_a_run_counts_all_its_axes(saved):
    folder = saved / "global_step6"
    folder.mkdir()
    plan = tiny_plan("--ds-sequence-parallel-size", "2", world_size=4)
    state = TrainState(iteration=6)
    empty = {"config": {}, "versions": {}, "partition_dims": {}, "files": ()}
    write_manifest(folder, Manifest(state=state, plan=plan.to_dict(), **empty))
    assert read_saved_run(str(saved)).world_size == plan.parallel.world_size == 4


@pytest.mark.parametrize(
    ("flags", "samples"),
    [([], 32), (["--ckpt-step", "2"], 16), (["--ckpt-step", "3"], 0), (["--reset-progress"], 0)],
)
def test_consumed_samples_are_those_of_the_checkpoint_to_resume_from(saved, flags, samples):
    assert saved_progress(tiny_config("--load", str(saved), *flags).checkpoint).samples == samples
    assert saved_progress(tiny_config().checkpoint) == (0, 0, 0)
