"""A run under way that loads a checkpoint of its own goes on as if it had never been beyond it."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from itertools import islice

import torch
import torch.distributed as dist
from engines import batches_of, engine_of
from ranks import run_on_ranks

from megatron.checkpointing.resharding.unpickle import read_state

LAYOUTS = {
    "plain": "",
    "bf16": "--bf16",
    "zero1": "--zero-stage 1",
    "bf16_zero2": "--bf16 --zero-stage 2",
    "bf16_zero3": "--bf16 --zero-stage 3",
    "tensor": "--tensor-model-parallel-size 2",
    "stages": "--pipeline-model-parallel-size 2",
    "bf16_stages": "--bf16 --pipeline-model-parallel-size 2",
    "muon": "--optimizer muon",
    "ring": "--context-parallel-size 2 --attention-dropout 0.1",
    "bf16_ring": "--context-parallel-size 2 --bf16 --zero-stage 1",
}


def steps_of(engine, batches):
    """Return losses and norms of steps on `batches`, and the weights behind them."""
    output = []
    for batch in batches:
        output.append((float(engine.train_batch(iter(batch))), engine.grad_norm))
    named = engine.module.named_parameters()
    return output, {n: getattr(p, "ds_tensor", p).detach().clone() for n, p in named}


def goes_on_alike(flags, folder):
    words = [*flags.split(), "--global-batch-size", "4", "--hidden-dropout", "0.1"]
    engine, plan, groups = engine_of(*words)
    read = batches_of(plan, groups)
    first, lost, last = (
        [list(islice(read, plan.batch.num_micro_batches(4))) for _ in range(2)] for _ in range(3)
    )
    steps_of(engine, first)
    engine.save(folder, "global_step2", {})
    dist.barrier()
    expected = steps_of(engine, last)
    beyond = steps_of(engine, lost)
    assert beyond[0] != expected[0]
    engine.load(folder, "global_step2", read=read_state)
    found = steps_of(engine, last)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())


def goes_back(rank, folder):
    for name, flags in LAYOUTS.items():
        try:
            goes_on_alike(flags, folder / name)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error


def test_a_run_that_goes_back_goes_on_as_if_it_had_never_been_beyond(tmp_path):
    run_on_ranks(2, goes_back, tmp_path, tmp_path)
