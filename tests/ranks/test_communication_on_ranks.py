"""Collectives of a step: kinds, bytes, what hides them; overlapped reduction against DeepSpeed's."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from communication import hidden_share
from engines import batches_of, engine_of
from golden_files import require_golden
from ranks import outcomes_on_ranks, require_passed
from step_traffic import (
    SEQUENCE,
    STAGES,
    TENSOR,
    json_file,
    layouts_of_golden_file,
    recorded,
    step_of,
)
from torch.testing import assert_close

SGD = (
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--num-layers", "4"),
    *("--optimizer", "sgd", "--global-batch-size", "8", "--micro-batch-size", "1"),
    *("--zero-stage", "1", "--zero-reduce-bucket-size", "1000"),
    *("--zero-allgather-bucket-size", "1000"),
)
WIDE = ("--untie-embeddings-and-output-weights", "--hidden-size", "16", "--num-layers", "16")
SIZES = (8, 8, 16, 4)


def reduced_after_backward() -> tuple[str, str]:
    """Return the flags of a run whose gradients DeepSpeed reduces by itself."""
    content = {"bf16": {"enabled": True, "immediate_grad_update": False}}
    return ("--deepspeed_config", json_file(content))


def fill_what_is_not_owned(engine):
    """Write NaN to all gradients that another replica owns, which a reduction leaves as they were."""
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


def gradients_and_weights_travel_hidden(rank):
    for samples in ("4", "16"):
        found = recorded(*SGD, "--bf16", *WIDE, "--global-batch-size", samples).tensors
        for kind in ("reduce-scatter", "all-gather"):
            assert hidden_share([each for each in found if each.kind == kind]) >= 0.9


def all_ranks_issue_the_same(rank):
    own = [
        (each.kind, each.num_bytes)
        for each in recorded(*SGD, "--bf16", *SEQUENCE).collectives
        if each.kind in ("reduce-scatter", "all-gather")
    ]
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    assert everyones == [own] * len(everyones)


def tensor_parallel_backward_hides_all_that_it_can(rank):
    for layout, kind in ((TENSOR, "all-reduce"), (SEQUENCE, "reduce-scatter")):
        step = recorded(*SGD, "--bf16", *WIDE, *layout, "--num-layers", "8")
        hidden = [each for each in step.tensors if each.is_hidden and step.axis(each) == "tensor"]
        by_kind = Counter(each.kind for each in hidden)
        # In each of 4 micro-batches: the inputs of two column-parallel layers a block, and the head.
        assert by_kind.pop(kind) == 4 * (2 * 8 + 1)
        assert by_kind == ({"all-gather": 4 * (2 * 8 + 1)} if layout == SEQUENCE else {})


def bytes_of_a_step_are_those_of_the_planner(rank):
    """On every rank; the golden file has the collectives of rank 0."""
    lines = []
    for name, flags in layouts_of_golden_file().items():
        step = step_of(*flags)
        lines += [f"[{name}]", *step.lines()]
        if "experts" in name:
            continue  # counted roughly
        # Partitions are padded; at ZeRO 3 the weights behind the last forward pass are not dropped.
        near = 0.02 if "ZeRO 3" in name else 1e-3
        assert step.sent() == pytest.approx(step.planned(), rel=near, abs=100), name
        assert len(step.sums_of_parts()) == ("sequence parallel" in name), name
        data = [each for each in step.tensors if step.axis(each) == "data"]
        assert len(data) < (step.number + 1) * step.parameters, name
    if rank == 0:
        require_golden("communication.txt", "\n".join(lines) + "\n")


CHECKS = [
    overlapped_reduction_takes_deepspeeds_steps,
    divided_sequences_are_as_near_to_fp32_as_deepspeeds,
    gradients_and_weights_travel_hidden,
    all_ranks_issue_the_same,
    tensor_parallel_backward_hides_all_that_it_can,
    bytes_of_a_step_are_those_of_the_planner,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("communication"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check, outcomes):
    require_passed(check, outcomes)
