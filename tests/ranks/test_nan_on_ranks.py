"""A NaN in one rank's copy of a weight that others hold too refuses the step on all ranks."""

import pytest
import torch
from engines import batches_of, engine_of
from ranks import outcomes_on_ranks, require_passed

from megatron.tensor_parallel.sharding import shard_of

TENSOR = ("--tensor-model-parallel-size", "2")
RING = ("--context-parallel-size", "2")


def refuses(rank, *flags, layout=TENSOR):
    engine, plan, groups = engine_of(*layout, *flags)
    batches = batches_of(plan, groups)
    engine.train_batch(batches)
    copies = {
        name: p for name, p in engine.module.named_parameters() if not shard_of(p) and p.dim() == 1
    }
    assert copies
    before = {name: weight_of(p).clone() for name, p in copies.items()}
    for value, name in ((torch.nan, min(copies)), (torch.inf, max(copies))):
        skipped = engine.skipped_steps
        spoil = (lambda grad, value=value: torch.full_like(grad, value)) if rank else torch.clone
        hook = copies[name].register_hook(spoil)
        engine.train_batch(batches)
        hook.remove()
        assert engine.skipped_steps == skipped + 1, (name, value)
        assert engine.grad_norm == torch.inf
        assert all(torch.equal(weight_of(p), before[n]) for n, p in copies.items())
    loss = float(engine.train_batch(batches))
    assert loss < torch.inf
    assert engine.skipped_steps == skipped + 1
    assert all(weight_of(p).isfinite().all() for p in copies.values())


def weight_of(parameter):
    # At ZeRO stage 3 a weight lies in its own piece.
    return getattr(parameter, "ds_tensor", parameter).detach()


def fp32(rank):
    refuses(rank)


def fp32_zero1(rank):
    refuses(rank, "--zero-stage", "1")


def fp32_zero2(rank):
    refuses(rank, "--zero-stage", "2")


def fp32_zero3(rank):
    refuses(rank, "--zero-stage", "3")


def ring_attention(rank):
    refuses(rank, layout=RING)


def ring_attention_in_bf16_zero2(rank):
    refuses(rank, "--bf16", "--zero-stage", "2", layout=RING)


def bf16(rank):
    refuses(rank, "--bf16", "--zero-stage", "0")


def bf16_zero1(rank):
    refuses(rank, "--bf16", "--zero-stage", "1")


def bf16_zero2(rank):
    refuses(rank, "--bf16", "--zero-stage", "2")


def bf16_zero3(rank):
    refuses(rank, "--bf16", "--zero-stage", "3")


def on_the_cpu(rank):
    offload = ["--cpu-optimizer", "--cpu_torch_adam"]
    refuses(rank, "--zero-stage", "1", *offload)
    refuses(rank, "--bf16", "--zero-stage", "2", *offload)
    refuses(rank, "--bf16", "--zero-stage", "3", *offload)


CHECKS = [
    fp32,
    fp32_zero1,
    fp32_zero2,
    fp32_zero3,
    bf16,
    bf16_zero1,
    bf16_zero2,
    bf16_zero3,
    on_the_cpu,
    ring_attention,
    ring_attention_in_bf16_zero2,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_nan_of_one_rank_refuses_the_step(check, outcomes):
    require_passed(check, outcomes)
