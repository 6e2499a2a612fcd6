"""Where scalars go."""

import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from tiny import tiny_config, tiny_plan

from megatron.errors import ConfigError
from megatron.training.loop import StepResult
from megatron.training.state import TrainState
from megatron.training.tensorboard import TensorBoard
from megatron.training.writers import Both, WandbWriter, build_writer, writer_problems


class WandbRun:
    def __init__(self):
        self.points, self.said, self.finished = [], {}, False
        self.config = SimpleNamespace(update=lambda new, allow_val_change: self.said.update(new))

    def log(self, values, step):
        self.points.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package wandb."""
    module = SimpleNamespace(Error=RuntimeError, run=WandbRun())

    def init(**wishes):
        module.wishes = wishes
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
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


def test_weights_and_biases_gets_the_curves_over_iterations(wandb):
    flags = ["--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-entity", "u"]
    plan = tiny_plan(*flags)
    board = TensorBoard(
        build_writer(plan.logging), plan, asdict(tiny_config(*flags)), TrainState(iteration=2)
    )
    board.after_step(TrainState(iteration=3, samples=12, tokens=36), STEP)
    board.close()
    assert wandb.wishes == {"project": "p", "name": "e", "entity": "u", "dir": None}
    assert wandb.run.said["lr"] == "0.1"
    steps = [step for step, _ in wandb.run.points]
    assert steps == sorted(steps)
    logged = {tag: value for step, values in wandb.run.points for tag, value in values.items()}
    assert logged["lm-loss-training/lm loss"] == 3.0
    assert logged["steps-vs-samples/y=samples,x=steps"] == 12
    assert logged["params-norm/params-norm"] == 2.0
    assert logged["num-zeros/num-zeros"] == 5.0
    assert logged["curriculum_seqlen"] == 3
    assert not [tag for tag in logged if " vs " in tag]
    assert wandb.run.finished


def test_a_refusal_of_wandb_is_told(wandb):
    def refuse(**wishes):
        raise wandb.Error("no api key")

    wandb.init = refuse
    with pytest.raises(ConfigError, match="--wandb-project p: no api key"):
        build_writer(tiny_plan("--wandb-project", "p").logging)


def test_both_writers_get_everything(tmp_path, wandb):
    flags = ["--wandb-project", "p", "--tensorboard-dir", str(tmp_path)]
    writer = build_writer(tiny_plan(*flags).logging)
    assert isinstance(writer, Both)
    writer.add_scalar("tag", 2.0, 7)
    writer.add_text("flag", "value", 7)
    writer.flush()
    writer.close()
    (events,) = tmp_path.iterdir()
    assert b"tag" in events.read_bytes()
    assert wandb.run.points == [(7, {"tag": 2.0})]


def test_nobody_writes_when_nobody_asks():
    assert build_writer(tiny_plan().logging) is None


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = ["--wandb-project", "p", "--tensorboard-dir", "t", "--codecarbon-dir", "c"]
    problems = [*writer_problems(tiny_config(*flags).logging)]
    assert [problem.split(":")[0] for problem in problems] == [
        "--wandb-project needs the package wandb",
        "--tensorboard-dir needs the package tensorboard",
        "--codecarbon-dir needs the package codecarbon",
    ]
    assert [*writer_problems(tiny_config().logging)] == []


def test_wandb_writer_ignores_curves_over_other_things():
    run = WandbRun()
    writer = WandbWriter(run)
    for tag in ("loss vs samples", "steps-vs-tokens/y=steps,x=tokens"):
        writer.add_scalar(tag, 1.0, 100)
    assert run.points == []
