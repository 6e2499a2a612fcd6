"""TensorBoard's tags: dashboards and scripts look for them."""

from dataclasses import asdict, replace

import pytest
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.train_state import TrainState
from megatron.training.loop.loop import StepResult
from megatron.training.telemetry.tensorboard import TensorBoard
from megatron.training.telemetry.writers import build_writer

STEP = StepResult(
    loss=3.0,
    lr=0.1,
    batch_size=4,
    seq_length=6,
    seconds=2.0,
    grad_norm=1.5,
    loss_scale=8.0,
    skipped=False,
)
STATE = TrainState(iteration=10, samples=40, tokens=240)
LOSS = "lm-loss-training/lm loss"
VALID = "lm-loss-validation/valid/lm loss validation"


class Writer:
    def __init__(self):
        self.scalars, self.texts, self.flushed = {}, {}, False

    def add_scalar(self, tag, value, x):
        self.scalars.setdefault(tag, []).append((x, value))

    def add_text(self, tag, text, x):
        self.texts[tag] = (x, text)

    def flush(self):
        self.flushed = True


def board(*flags, device="cpu", state=None):
    plan, config = tiny_plan(*flags, device=device), tiny_config(*flags)
    writer = Writer()
    made = TensorBoard(writer, plan, asdict(config), state or TrainState())
    return made, writer, plan


def written(*flags, device="cpu", state=STATE, step=STEP):
    made, writer, _ = board(*flags, device=device)
    writer.scalars.clear()
    made.after_step(state, step)
    return writer.scalars


def test_a_start_writes_the_config_and_a_spike():
    _, writer, _ = board("--seed", "7", state=TrainState(iteration=3))
    assert writer.texts["seed"] == (3, "7")
    assert writer.texts["num_layers"] == (3, "2")
    assert writer.scalars == {"iteration-time/world_size": [(3, 1), (4, 0)]}


def test_a_step_writes_loss_rate_norm_and_progress():
    _, _, plan = board()
    gigaflos = 6 * 240 * plan.model.num_parameters_without_embeddings / 1e9
    assert written() == {
        "steps-vs-samples/y=steps,x=samples": [(40, 10)],
        "steps-vs-samples/y=samples,x=steps": [(10, 40)],
        "steps-vs-tokens/y=steps,x=tokens": [(240, 10)],
        "steps-vs-tokens/y=tokens,x=steps": [(10, 240)],
        LOSS: [(10, 3.0)],
        f"{LOSS} vs samples": [(40, 3.0)],
        f"{LOSS} vs tokens": [(240, 3.0)],
        f"{LOSS} vs gigaflos (without embeddings)": [(int(gigaflos), 3.0)],
        "learning-rate/learning-rate": [(10, 0.1)],
        "learning-rate/learning-rate vs samples": [(40, 0.1)],
        "learning-rate/learning-rate vs tokens": [(240, 0.1)],
        "grad-norm/grad-norm": [(10, 1.5)],
        "grad-norm/grad-norm vs samples": [(40, 1.5)],
        "grad-norm/grad-norm vs tokens": [(240, 1.5)],
    }


def test_memory_is_written_where_it_was_measured():
    """Over iterations, at log lines."""
    step = replace(STEP, measures={**STEP.measures, "resident (GiB)": 2.5})
    assert written(step=step) == written() | {"memory/resident (GiB)": [(10, 2.5)]}


def test_the_rate_of_embeddings_is_written_where_they_have_their_own():
    tag = "learning-rate/decoupled-learning-rate"
    assert written(step=replace(STEP, embedding_lr=0.3)) == written() | {
        tag: [(10, 0.3)],
        f"{tag} vs samples": [(40, 0.3)],
        f"{tag} vs tokens": [(240, 0.3)],
    }


def test_gigaflos_are_counted_without_embeddings():
    tokens = 10**15
    state = TrainState(iteration=10, samples=40, tokens=tokens)
    (point,) = written(state=state)[f"{LOSS} vs gigaflos (without embeddings)"]
    _, _, plan = board()
    assert point[0] == 6 * 10**6 * plan.model.num_parameters_without_embeddings


@pytest.mark.parametrize(
    ("flag", "added"),
    [
        (
            "--log-batch-size-to-tensorboard",
            {
                "batch-size/batch-size": [(10, 4)],
                "batch-size/batch-size vs samples": [(40, 4)],
            },
        ),
        (
            "--log-timers-to-tensorboard",
            {
                "iteration-time/iteration-time": [(10, 2.0)],
                "iteration-time/iteration-time vs samples": [(40, 2.0)],
                "iteration-time/iteration-time vs tokens": [(240, 2.0)],
                "iteration-time/samples per second": [(10, 2.0)],
                "iteration-time/samples per second per replica": [(10, 2.0)],
                "iteration-time/tokens per second": [(10, 12.0)],
                "iteration-time/tokens per second per replica": [(10, 12.0)],
            },
        ),
    ],
)
def test_a_flag_adds_its_tags(flag, added):
    scalars = written(flag, "--log-interval", "5")
    flops = scalars.pop("iteration-time/TFLOPs per gpu (estimated)", None)
    assert scalars == written() | added
    assert (flops is not None) == ("timers" in flag)


def test_a_flag_leaves_the_learning_rate_out():
    scalars = written("--no-log-learning-rate-to-tensorboard")
    assert not [tag for tag in scalars if "learning" in tag]


def test_the_loss_scale_belongs_to_fp16():
    scalars = written("--fp16", device="cuda")
    assert scalars["loss-scale/loss-scale"] == [(10, 8.0)]
    off = written("--fp16", "--no-log-loss-scale-to-tensorboard", device="cuda")
    assert "loss-scale/loss-scale" not in off


def test_scalars_are_written_at_multiples_of_the_interval():
    assert written("--tensorboard-log-interval", "3") == {}
    assert LOSS in written("--tensorboard-log-interval", "5")


@pytest.mark.parametrize("with_ppl", [False, True])
def test_an_evaluation_writes_its_loss_and_on_request_its_perplexity(with_ppl):
    made, writer, _ = board(*["--log-validation-ppl-to-tensorboard"][: int(with_ppl)])
    writer.scalars.clear()
    made.after_evaluation("valid", 2.0, 7.4, STATE)
    ways = ["", " vs samples", " vs tokens", " vs gigaflos (without embeddings)"]
    tags = [VALID, *[f"{VALID} ppl"] * with_ppl]
    assert set(writer.scalars) == {tag + way for tag in tags for way in ways}
    assert writer.scalars[VALID] == [(10, 2.0)]
    assert writer.flushed


def test_event_files_are_written(tmp_path):
    plan = tiny_plan("--tensorboard-dir", str(tmp_path / "tb"))
    writer = build_writer(plan.logging, {})
    TensorBoard(writer, plan, asdict(tiny_config()), TrainState()).close()
    (file,) = (tmp_path / "tb").iterdir()
    assert file.name.startswith("events.out.tfevents")
    assert b"iteration-time/world_size" in file.read_bytes()
