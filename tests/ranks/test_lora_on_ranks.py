"""Adapters: nothing else is trained, and every layout trains them alike."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engines import batches_of, engine_of, trained
from ranks import outcomes_on_ranks, require_passed
from torch.testing import assert_close

from megatron.checkpointing.conversion.adapters import merge_adapters, without_adapters
from megatron.checkpointing.manifest import Manifest, record_file
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.checkpointing.train_state import TrainState
from megatron.tensor_parallel.linear import is_adapter
from megatron.tensor_parallel.sharding import shard_of

BASE = [
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--global-batch-size", "4"),
    *("--pad-vocab-size-to", "16"),
    *("--optimizer", "sgd", "--sgd-momentum", "0.9", "--lr", "0.05", "--clip-grad", "0.5"),
]
LORA = [*BASE, "--lora-rank", "3", "--lora-alpha", "6", "--lora-target-modules", "all-linear"]
TENSOR = ["--tensor-model-parallel-size", "2"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
LAYOUTS = [
    TENSOR,
    [*TENSOR, "--sequence-parallel"],
    [*PIPELINE, "--checkpoint-activations"],
    ["--zero-stage", "1"],
    ["--zero-stage", "2", "--checkpoint-activations"],
    ["--zero-stage", "3"],
]


def part_of(whole, rank, part):
    """Return the part of a whole tensor that has the shape of `part`."""
    for dim in range(whole.dim()):
        if whole.shape[dim] != part.shape[dim]:
            return whole.chunk(2, dim)[rank]
    return whole


def every_layout_trains_the_adapters_alone_and_alike(rank):
    expected = trained(*LORA)
    engine, *_ = engine_of(*LORA)
    begun = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    for name, first in begun.items():
        assert torch.equal(first, expected[name]) != is_adapter(name), name
    assert sum(map(is_adapter, begun)) == 2 * 4 * 2
    for flags in LAYOUTS:
        found = trained(*LORA, *flags)
        for name, value in found.items():
            whole = part_of(expected[name], rank, value)
            output = f"{flags} {name}: "
            assert_close(value, whole, rtol=1e-4, atol=1e-5, msg=output.__add__)


def the_adapter_is_the_product_of_its_matrices(rank):
    engine, plan, _ = engine_of(*LORA)
    layer = dict(engine.module.named_modules())["3.mlp.dense_h_to_4h"]
    layer.lora_B.data.normal_()
    x = torch.randn(5, 2, 8)
    weight = layer.weight + 6 / 3 * layer.lora_B @ layer.lora_A
    bias = layer.bias if layer.adds_bias else None
    assert_close(layer(x), F.linear(x, weight, bias))
    assert layer.lora_A.abs().max() <= 8**-0.5
    assert shard_of(layer.lora_A) is None


def dropped(rank):
    found = trained(*LORA, "--lora-dropout", "0.5", *TENSOR)
    assert not torch.equal(found["losses"], trained(*LORA, *TENSOR)["losses"])
    everyones = [None, None]
    dist.all_gather_object(everyones, found["3.mlp.dense_h_to_4h.lora_A"].tolist())
    assert everyones[0] == everyones[1], "what both ranks hold whole stays the same on both"


def saved(engine, plan):
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine.save(Path(folder[0]), "here", {})
    dist.barrier()
    dims = {
        name: shard.dim
        for name, p in engine.module.named_parameters()
        if (shard := shard_of(p)) is not None
    }
    files = (Path(folder[0]) / "here").iterdir()
    manifest = Manifest(
        state=TrainState(),
        plan=plan.to_dict(),
        config={},
        versions={},
        partition_dims=dims,
        files=tuple(record_file(file) for file in files),
    )
    return Path(folder[0]), manifest


def a_base_gets_adapters_and_a_run_goes_on_bit_for_bit(rank):
    for layout in (TENSOR, ["--zero-stage", "1"], ["--zero-stage", "3"]):
        base, plan, groups = engine_of(*BASE, *layout)
        base.train_batch(batches_of(plan, groups))
        folder, manifest = saved(base, plan)
        loss = base.evaluate(batches_of(plan, groups), 1)

        engine, plan, groups = engine_of(*LORA, *layout)
        whole = read_sharded(folder / "here", manifest, optimizer=False)
        engine.load_full(whole, optimizer=False)
        assert_close(engine.evaluate(batches_of(plan, groups), 1), loss, rtol=0, atol=1e-6)
        batches = batches_of(plan, groups)
        engine.train_batch(batches)
        folder, manifest = saved(engine, plan)
        rest = [next(batches) for _ in range(4)]
        straight = [engine.train_batch(iter(rest)) for _ in range(2)]

        other, plan, groups = engine_of(*LORA, *layout)
        other.load(folder, "here", read=read_state)
        assert [other.train_batch(iter(rest)) for _ in range(2)] == straight
        reshaped, plan, groups = engine_of(*LORA)
        whole = read_sharded(folder / "here", manifest)
        reshaped.load_full(whole)
        loss = reshaped.evaluate(batches_of(plan, groups), 1)
        lora_spec = plan.model
        plain, plan, groups = engine_of(*BASE)
        assert plan.model == without_adapters(plan.model)
        plain.load_full(merge_adapters(lora_spec, whole), optimizer=False)
        assert_close(plain.evaluate(batches_of(plan, groups), 1), loss, rtol=0, atol=1e-5)


CHECKS = [
    every_layout_trains_the_adapters_alone_and_alike,
    the_adapter_is_the_product_of_its_matrices,
    dropped,
    a_base_gets_adapters_and_a_run_goes_on_bit_for_bit,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
