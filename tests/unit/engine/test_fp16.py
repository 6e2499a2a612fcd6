"""fp16's loss scale.

DeepSpeed refuses fp16 on CPUs, though torch computes it there; so its check is turned off.
"""

import json

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.manifest import Manifest, record_file
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import TrainingError

# Not adam: it would blow up the rounding errors of key biases, whose gradient is zero.
SGD = ["--optimizer", "sgd", "--weight-decay", "0"]


@pytest.fixture
def build_fp16(build, fp16, tmp_path):
    """Return a function from a power of two, the first loss scale, to an engine."""

    def build_from(power, *flags):
        file = tmp_path / f"{power}.json"
        file.write_text(json.dumps({"fp16": {"initial_scale_power": power, "hysteresis": 1}}))
        return build(*SGD, "--fp16", "--deepspeed_config", str(file), *flags, device="cuda")

    return build_from


def test_an_overflow_skips_the_step_and_lowers_the_scale(build_fp16, micro_batch):
    engine = build_fp16(30)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.train_batch(iter([micro_batch(0)]))
    assert engine.skipped_steps == 1
    assert engine.loss_scale == 2.0**29
    for name, parameter in engine.module.named_parameters():
        assert (parameter == before[name]).all()


def test_an_overflow_at_the_least_scale_ends_the_run_with_a_sentence(build_fp16, micro_batch):
    engine = build_fp16(30, "--min-loss-scale", str(2.0**29))
    engine.train_batch(iter([micro_batch(0)]))
    with problem("--min-loss-scale … --lr", TrainingError):
        engine.train_batch(iter([micro_batch(1)]))


def test_a_step_is_that_of_32_bits_but_for_rounding(build, build_fp16, micro_batch):
    engine, exact = build_fp16(8), build(*SGD)
    for number in range(3):
        loss = engine.train_batch(iter([micro_batch(number)]))
        assert float(loss) == pytest.approx(
            float(exact.train_batch(iter([micro_batch(number)]))), rel=2e-2
        )
        assert engine.grad_norm == pytest.approx(exact.grad_norm, rel=2e-2)
    assert engine.skipped_steps == 0
    assert engine.loss_scale == 2.0**8


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_a_loaded_engine_goes_on_with_the_scale(build_fp16, micro_batch, tmp_path, stage):
    engine = build_fp16(30, "--zero-stage", stage)
    for number in range(3):
        engine.train_batch(iter([micro_batch(number)]))
    engine.save(tmp_path, "tag", {})
    again = build_fp16(8, "--zero-stage", stage)
    again.load(tmp_path, "tag", read=read_state)
    for each in (engine, again):
        each.train_batch(iter([micro_batch(3)]))
        assert (each.loss_scale, each.skipped_steps) == (2.0**26, 4)


def test_another_layout_goes_on_with_the_scale_and_the_counters(build_fp16, micro_batch, tmp_path):
    engine = build_fp16(30)
    for number in range(3):
        engine.train_batch(iter([micro_batch(number)]))
    assert engine.skipped_steps == 3
    engine.save(tmp_path, "tag", {})
    manifest = Manifest(
        state=TrainState(),
        plan=tiny_plan("--zero-stage", "1").to_dict(),
        config={},
        versions={},
        partition_dims={},
        files=tuple(map(record_file, (tmp_path / "tag").iterdir())),
    )
    other = build_fp16(8, "--zero-stage", "3")
    other.load_full(read_sharded(tmp_path / "tag", manifest))
    assert (other.loss_scale, other.skipped_steps) == (2.0**27, 3)
    other.train_batch(iter([micro_batch(3)]))
    assert (other.loss_scale, other.skipped_steps) == (2.0**26, 4)
