"""Adam's 8-bit state is saved and gone on from, bit for bit."""

from itertools import repeat

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from eight_bits import AdamW8bit
from engines import deepspeed_of

from megatron.checkpointing.resharding.unpickle import read_state

LAYOUTS = {"zero0": [], "zero1": ["--zero-stage", "1"], "zero3": ["--bf16", "--zero-stage", "3"]}


@pytest.fixture
def build_8bit(build, modules):
    """Return a function from flags to an engine whose optimizer is the stand-in."""
    modules("bitsandbytes.optim", AdamW8bit=AdamW8bit)
    return lambda *flags: build("--optimizer", "adam8bit", *flags, device="cuda")


def losses(engine, micro_batch, numbers):
    engine.set_lr(0.01)
    return [float(engine.train_batch(repeat(micro_batch(number)))) for number in numbers]


def weights(engine):
    parameters = dict(engine.module.named_parameters())
    with GatheredParameters(list(parameters.values())):
        return {name: p.detach().float().clone() for name, p in parameters.items()}


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_with_8_bit_states_goes_on_as_it_would_have(build_8bit, micro_batch, tmp_path, flags):
    first = build_8bit(*flags)
    losses(first, micro_batch, range(3))
    states = deepspeed_of(first).basic_optimizer.state.values()
    assert any(kept["state1"].dtype == torch.uint8 and kept["state1"].any() for kept in states)
    first.save(tmp_path, "tag", {})
    second = build_8bit(*flags)
    second.load(tmp_path, "tag", read=read_state)
    assert losses(second, micro_batch, range(3, 6)) == losses(first, micro_batch, range(3, 6))
    expected = weights(first)
    for name, weight in weights(second).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_its_states_can_begin_anew(build_8bit, micro_batch, tmp_path, flags):
    first = build_8bit(*flags)
    losses(first, micro_batch, range(3))
    first.save(tmp_path, "tag", {})
    second = build_8bit(*flags)
    second.load(tmp_path, "tag", read=read_state, optimizer=False, streams=False)
    before = weights(second)
    losses(second, micro_batch, range(1))
    # A table of zeros would keep every state at zero, and the weights where they are.
    moved = max((weight - before[name]).abs().max() for name, weight in weights(second).items())
    assert moved == pytest.approx(0.01, abs=0.008)
    states = deepspeed_of(second).basic_optimizer.state.values()
    assert all(kept["qmap1"].any() for kept in states if "qmap1" in kept)
