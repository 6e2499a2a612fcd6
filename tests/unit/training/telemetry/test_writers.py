"""Where scalars go."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.train_state import TrainState
from megatron.training.loop.loop import StepResult
from megatron.training.telemetry.tensorboard import TensorBoard
from megatron.training.telemetry.writers import build_writer, writer_problems


@pytest.fixture
def wandb(modules, tmp_path):
    """A stand-in for the package wandb."""
    module = modules("wandb", Error=RuntimeError, ended=False)

    def init(**arguments):
        module.arguments = arguments
        return SimpleNamespace(dir=str(tmp_path / "run"))

    def finish():
        module.ended = True

    module.init, module.finish = init, finish
    return module


STEP = StepResult(
    loss=3.0,
    lr=0.1,
    batch_size=4,
    seq_length=3,
    seconds=2.0,
    grad_norm=1.5,
    loss_scale=8.0,
    skipped=False,
    measures={"params norm": 2.0, "num zeros": 5.0, "curriculum seqlen": 3},
)


def test_weights_and_biases_follows_the_event_files_of_its_run(wandb, tmp_path):
    flags = ["--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-entity", "u"]
    plan, config = tiny_plan(*flags), asdict(tiny_config(*flags))
    board = TensorBoard(build_writer(plan.logging, config), plan, config, TrainState(iteration=2))
    board.after_step(TrainState(iteration=3, samples=12, tokens=36), STEP)
    settings = wandb.arguments.pop("config")
    assert settings["lr"] == "0.1"
    names = {"project": "p", "name": "e", "entity": "u", "dir": None}
    assert wandb.arguments == {**names, "sync_tensorboard": True}
    assert not wandb.ended
    board.close()
    assert wandb.ended
    (events,) = (tmp_path / "run").iterdir()
    for tag in (b"lm-loss-training/lm loss", b"params-norm", b"num-zeros", b"curriculum_seqlen"):
        assert tag in events.read_bytes()


def test_weights_and_biases_starts_before_the_writer_that_it_follows(wandb, tmp_path):
    seen = []
    wandb.init = lambda **arguments: seen.append((tmp_path / "tb").exists())
    flags = ["--wandb-project", "p", "--tensorboard-dir", str(tmp_path / "tb")]
    build_writer(tiny_plan(*flags).logging, {}).close()
    assert seen == [False]
    assert (tmp_path / "tb").exists()


def test_a_refusal_of_wandb_is_told(wandb):
    def refuse(**arguments):
        raise wandb.Error("no api key")

    wandb.init = refuse
    with problem("--wandb-project p: no api key"):
        build_writer(tiny_plan("--wandb-project", "p").logging, {})


def test_without_their_flags_no_writer_is_made():
    assert build_writer(tiny_plan().logging, {}) is None


def test_a_package_that_is_missing_is_named(modules):
    for package in ("wandb", "tensorboard", "codecarbon"):
        modules(package)
    flags = ["--wandb-project", "p", "--tensorboard-dir", "t", "--codecarbon-dir", "c"]
    problems = [*writer_problems(tiny_config(*flags).logging)]
    assert [problem.split(":")[0] for problem in problems] == [
        "--wandb-project needs the package wandb",
        "--tensorboard-dir needs the package tensorboard",
        "--codecarbon-dir needs the package codecarbon",
    ]
    assert [*writer_problems(tiny_config().logging)] == []
