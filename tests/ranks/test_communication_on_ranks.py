"""Collectives of a step: kinds, bytes, what hides them; overlapped reduction against DeepSpeed's."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import batches_of, engine_of
from ranks import outcomes_on_ranks, require_passed
from torch.testing import assert_close

from megatron.diagnostics.communication import Collective, hidden_share, record_communication

SGD = (
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--num-layers", "4"),
    *("--optimizer", "sgd", "--global-batch-size", "8", "--micro-batch-size", "1"),
    *("--zero-stage", "1", "--zero-reduce-bucket-size", "1000"),
    *("--zero-allgather-bucket-size", "1000"),
)
TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
STAGES = ("--pipeline-model-parallel-size", "2")
WIDE = ("--untie-embeddings-and-output-weights", "--hidden-size", "16", "--num-layers", "16")
SIZES = (8, 8, 16, 4)


def reduced_after_backward() -> tuple[str, str]:
    """Return the flags of a run whose gradients DeepSpeed reduces by itself."""
    file = Path(tempfile.mkdtemp()) / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True, "immediate_grad_update": False}}))
    return ("--deepspeed_config", str(file))


def fill_what_is_not_owned(engine):
    """Write NaN to all gradients that another replica owns, which gloo leaves as they were."""
    inner = engine._engine
    reduce, zero = inner.buffered_allreduce_fallback, inner.optimizer

    def reduce_and_fill(*args, **kwargs):
        reduce(*args, **kwargs)
        pairs = zip(
            zero.fp32_groups_gradients_flat, zero.fp32_groups_gradient_flat_partition, strict=True
        )
        for flat, own in pairs:
            kept = own.clone()
            flat.fill_(torch.nan)
            own.copy_(kept)

    inner.buffered_allreduce_fallback = reduce_and_fill


def steps_of(*flags, before=lambda engine: None, precision=("--bf16",)):
    """Return losses, norms and weights after steps of several global batch sizes."""
    engine, plan, groups = engine_of(*SGD, *precision, *flags)
    before(engine)
    batches = batches_of(plan, groups)
    found = []
    for samples in SIZES:
        engine.set_global_batch_size(samples)
        found.append((float(engine.train_batch(batches)), engine.grad_norm))
        engine.evaluate(batches, 1)
    return torch.tensor(found), dict(engine.module.named_parameters())


def overlapped_reduction_takes_deepspeeds_steps(rank):
    for layout in ((), TENSOR, STAGES, (*STAGES, "--untie-embeddings-and-output-weights")):
        found, weights = steps_of(*layout, before=fill_what_is_not_owned)
        expected, stock = steps_of(*layout, *reduced_after_backward())
        assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert_close(weights, stock, rtol=1e-2, atol=1e-5)


def divided_sequences_are_as_near_to_fp32_as_deepspeeds(rank):
    exact, _ = steps_of(*SEQUENCE, precision=())
    found, _ = steps_of(*SEQUENCE, before=fill_what_is_not_owned)
    stock, _ = steps_of(*SEQUENCE, *reduced_after_backward())
    assert (found - exact).abs().max() < 1.5 * (stock - exact).abs().max() + 1e-3


def recorded(*flags) -> tuple[list[Collective], int]:
    """Return the collectives of two steps, and how many weights this rank has."""
    engine, plan, groups = engine_of(*SGD, "--bf16", *flags)
    batches = batches_of(plan, groups)
    engine.train_batch(batches)
    _ = engine.module  # waits for the weights
    with record_communication() as record:
        engine.train_batch(batches)
        engine.train_batch(batches)
        _ = engine.module
    return record.collectives, sum(p.numel() for p in engine.module.parameters())


def gradients_and_weights_travel_once_and_hidden(rank):
    for samples in ("4", "16"):
        found, size = recorded(*WIDE, "--global-batch-size", samples)
        by_kind = Counter()
        for each in found:
            by_kind[each.kind] += each.num_bytes
        padding = 2 * 2 * 4 * 2  # two steps, each group to a multiple of 8 numbers
        assert 0 <= by_kind["reduce"] - 2 * 4 * size <= 4 * padding
        assert 0 <= by_kind["broadcast"] - 2 * 2 * size <= 2 * padding
        assert by_kind["all-reduce"] == 2 * (4 + 4)  # loss and norm
        assert set(by_kind) == {"reduce", "broadcast", "all-reduce"}
        gradients = [each for each in found if each.kind == "reduce"]
        assert hidden_share(gradients) >= 0.9
        # Those of the last step have no forward pass to hide them.
        weights = [each for each in found if each.kind == "broadcast"]
        assert hidden_share(weights[: len(weights) // 2]) >= 0.9
        assert len(gradients) < 2 * (size / 1000 + 4 * 2)  # buckets, not parameters


def all_ranks_issue_the_same(rank):
    found, _ = recorded(*SEQUENCE)
    own = [
        (each.kind, each.num_bytes, each.ranks)
        for each in found
        if each.kind in ("reduce", "broadcast")
    ]
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    for others in everyones:
        assert [each[:2] for each in others] == [each[:2] for each in own]


def tensor_parallel_backward_hides_what_it_can(rank):
    for layout, kind in ((TENSOR, "all-reduce"), (SEQUENCE, "reduce-scatter")):
        found, _ = recorded(*WIDE, *layout)
        of_layers = [each for each in found if len(each.ranks) == 2 and each.num_bytes > 8]
        hidden = [each for each in of_layers if each.is_hidden and each.kind == kind]
        # In each of 4 micro-batches: the inputs of two column-parallel layers a block, and the head.
        assert len(hidden) == 2 * 4 * (2 * 16 + 1)
        if layout == SEQUENCE:
            gathers = [each for each in of_layers if each.is_hidden and each.kind == "all-gather"]
            assert len(gathers) == len(hidden)
            # Norms, biases, positions: once a step.
            sums = [each for each in of_layers if each.kind == "all-reduce"]
            assert len(sums) <= 2 + 2 * 4 * 3


CHECKS = [
    overlapped_reduction_takes_deepspeeds_steps,
    divided_sequences_are_as_near_to_fp32_as_deepspeeds,
    gradients_and_weights_travel_once_and_hidden,
    all_ranks_issue_the_same,
    tensor_parallel_backward_hides_what_it_can,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("communication"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check, outcomes):
    require_passed(check, outcomes)
