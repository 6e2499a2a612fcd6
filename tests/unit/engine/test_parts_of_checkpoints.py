"""Engines that save, load or have only a part: weights without an optimizer or random streams."""

from itertools import repeat

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from engines import deepspeed_of
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.manifest import Manifest, record_file
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError

LAYOUTS = {
    "fp32": [],
    "zero1": ["--zero-stage", "1"],
    "bf16": ["--bf16"],
    "zero2": ["--bf16", "--zero-stage", "2"],
    "zero3": ["--bf16", "--zero-stage", "3"],
}


def weights(engine):
    parameters = dict(engine.module.named_parameters())
    with GatheredParameters(list(parameters.values())):
        return {name: p.detach().float().clone() for name, p in parameters.items()}


def moments(engine):
    states = deepspeed_of(engine).basic_optimizer.state.values()
    return [v.clone() for state in states for v in state.values() if torch.is_tensor(v)]


def trained(engine, micro_batch, steps=3):
    engine.set_lr(0.01)
    for i in range(steps):
        engine.train_batch(repeat(micro_batch(i)))
    return engine


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_are_loaded_and_the_optimizer_begins_anew(build, micro_batch, tmp_path, flags):
    first = trained(build(*flags), micro_batch)
    first.save(tmp_path, "tag", {})
    second = build(*flags)
    torch.manual_seed(99)
    stream = torch.get_rng_state()
    second.load(tmp_path, "tag", read=read_state, optimizer=False, streams=False)

    assert torch.equal(torch.get_rng_state(), stream)
    expected = weights(first)
    for name, weight in weights(second).items():
        assert torch.equal(weight, expected[name]), name
    assert any(value.any() for value in moments(first))
    assert not any(value.any() for value in moments(second))
    # Its first step is Adam's first: a weight moves by the learning rate (bf16 has steps of 0.008 near 1).
    before = weights(second)
    trained(second, micro_batch, steps=1)
    moved = max((weight - before[name]).abs().max() for name, weight in weights(second).items())
    assert moved == pytest.approx(0.01, abs=0.008)


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_the_learning_rate_of_the_last_step_comes_back(build, micro_batch, tmp_path, flags):
    engine = trained(build(*flags), micro_batch, steps=1)
    engine.save(tmp_path, "tag", {})
    engine.set_lr(0.5)
    engine.load(tmp_path, "tag", read=read_state)
    rates = [group["lr"] for group in deepspeed_of(engine).optimizer.param_groups]
    assert rates == [0.01] * len(rates)


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_a_file_is_read_once(build, micro_batch, tmp_path, flags):
    trained(build(*flags), micro_batch, steps=1).save(tmp_path, "tag", {})
    names = []

    def read(file, device):
        names.append(file.name)
        return read_state(file, device)

    build(*flags).load(tmp_path, "tag", read=read)
    there = {file.name for file in (tmp_path / "tag").iterdir()}
    assert sorted([*names, "rng_rank_00000.pt"]) == sorted(there)


def test_random_streams_of_another_kind_of_device_are_refused_with_the_way_out(
    build, micro_batch, tmp_path
):
    engine = trained(build(), micro_batch, steps=1)
    engine.save(tmp_path, "tag", {})
    file = tmp_path / "tag" / "rng_rank_00000.pt"
    states = torch.load(file, weights_only=True)
    torch.save(states | {"device": states["device"][:16]}, file)  # as long as that of a GPU
    with problem("random streams … state size … --no-load-rng", CheckpointError):
        engine.load(tmp_path, "tag", read=read_state)
    engine.load(tmp_path, "tag", read=read_state, streams=False)


@pytest.mark.parametrize("flags", [*LAYOUTS.values()][:4], ids=[*LAYOUTS][:4])
def test_a_checkpoint_without_an_optimizer_is_smaller_and_holds_the_weights(
    build, micro_batch, tmp_path, flags
):
    first = trained(build(*flags), micro_batch)
    first.save(tmp_path, "all", {})
    first.save(tmp_path, "less", {}, optimizer=False, streams=False)

    def size(tag):
        return sum(file.stat().st_size for file in (tmp_path / tag).iterdir())

    assert size("less") < 0.6 * size("all")
    assert not [*(tmp_path / "less").glob("*optim*"), *(tmp_path / "less").glob("rng*")]
    # The engine still has its optimizer.
    trained(first, micro_batch, steps=1)
    again = build(*flags)
    again.load(tmp_path, "less", read=read_state, optimizer=False, streams=False)
    first.load(tmp_path, "all", read=read_state)
    expected = weights(first)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(again).items())


@pytest.mark.parametrize("flags", [[], ["--bf16", "--zero-stage", "2"]], ids=["fp32", "bf16"])
def test_an_engine_without_an_optimizer_evaluates_what_one_with_it_trained(
    build, micro_batch, tmp_path, flags
):
    first = trained(build(*flags), micro_batch)
    first.save(tmp_path, "tag", {})
    bare = build(*flags, optimizer=False)
    bare.load(tmp_path, "tag", read=read_state, optimizer=False, streams=False)
    batches = [micro_batch(7), micro_batch(8)]
    loss = bare.evaluate(iter(batches), 2)
    assert torch.equal(loss, first.evaluate(iter(batches), 2))


@pytest.mark.parametrize("stage", [0, 1])
def test_reshaped_states_have_the_order_of_the_first_step(build, micro_batch, tmp_path, stage):
    flags = ("--zero-stage", str(stage), "--optimizer", "adam")
    engine = trained(build(*flags), micro_batch, steps=1)
    engine.save(tmp_path, "tag", {})
    manifest = Manifest(
        state=TrainState(),
        plan=tiny_plan(*flags).to_dict(),
        config={},
        versions={},
        partition_dims={},
        files=tuple(map(record_file, (tmp_path / "tag").iterdir())),
    )
    other = build(*flags)
    other.load_full(read_sharded(tmp_path / "tag", manifest))
    assert order_of_states(other) == order_of_states(engine)


def order_of_states(engine):
    """Return the numbers of the parameters, and the keys of each state, as they follow each other."""
    optimizer = deepspeed_of(engine).basic_optimizer
    owners = [owner for group in optimizer.param_groups for owner in group["params"]]
    numbers = {owner: number for number, owner in enumerate(owners)}
    return [(numbers[owner], [*states]) for owner, states in optimizer.state.items()]
