"""Layouts in which the sequence is divided."""

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import ConfigError

TENSOR = "--tensor-model-parallel-size 2"
CONTEXT = "--context-parallel-size 2"


def plan_of(line, world_size):
    return tiny_plan(*line.split(), world_size=world_size)


def test_sequence_parallelism_needs_somebody_to_divide_with():
    alone = plan_of("--sequence-parallel", 1)
    assert not alone.parallel.sequence_parallel
    assert any("--sequence-parallel has no effect" in notice for notice in alone.notices)
    assert plan_of(f"{TENSOR} --sequence-parallel", 2).parallel.sequence_parallel


def test_stages_send_parts_as_they_are():
    line = f"{TENSOR} --pipeline-model-parallel-size 2"
    assert "pipeline" not in plan_of(line, 4).deepspeed
    pipeline = plan_of(f"{line} --sequence-parallel", 4).deepspeed["pipeline"]
    assert pipeline == {"pipe_partitioned": False, "grad_partitioned": False}


def test_ranks_that_share_samples_are_no_replicas():
    decided = plan_of("--ds-sequence-parallel-size 2 --global-batch-size 8", 4)
    assert (decided.parallel.sequence, decided.parallel.data) == (2, 2)
    assert decided.parallel.world_size == 4
    assert decided.deepspeed["gradient_accumulation_steps"] == 2


def test_context_parallelism_is_a_ring_or_ulysses():
    ring, other, deepspeeds = (
        plan_of(line, 4).parallel
        for line in (
            f"{CONTEXT} --cp-comm-type p2p p2p",
            f"{CONTEXT} --cp-comm-type a2a",
            "--ds-sequence-parallel-size 2",
        )
    )
    assert (ring.sequence, ring.data, ring.ring) == (2, 2, True)
    assert other == deepspeeds
    assert not other.ring


@pytest.mark.parametrize("types", ["p2p a2a+p2p", "a2a+p2p p2p", "a2a+p2p a2a+p2p"])
def test_layers_that_mix_both_forms_of_a_ring_communicate_alike(types):
    assert plan_of(f"{CONTEXT} --cp-comm-type {types}", 4).parallel.ring


def test_samples_are_padded_with_a_notice():
    (notice,) = (n for n in plan_of(CONTEXT, 2).notices if "padded" in n)
    assert "--seq-length 6 are padded to 8 positions" in notice
    even = plan_of(f"{CONTEXT} --seq-length 8 --max-position-embeddings 8", 2)
    assert not any("padded" in notice for notice in even.notices)
    with problem("samples of the objective prefix_lm cannot be padded"):
        tiny_plan(*CONTEXT.split(), world_size=2, objective="prefix_lm")


def test_groups_of_heads_need_not_be_divided_in_a_ring():
    grouped = "--num-attention-heads 2 --group-query-attention --num-query-groups 1"
    assert plan_of(f"{grouped} {CONTEXT}", 2).parallel.ring
    layout = plan_of(f"{TENSOR} --pipeline-model-parallel-size 2 {CONTEXT}", 8).parallel
    assert (layout.tensor, layout.pipeline, layout.sequence, layout.data) == (2, 2, 2, 1)


@pytest.mark.parametrize(
    ("line", "world_size", "output"),
    [
        (
            f"{TENSOR} --sequence-parallel --seq-length 5",
            2,
            "--seq-length 5 … multiple of --tensor-model-parallel-size 2",
        ),
        ("--ds-sequence-parallel-size 4", 4, "parallel-size 4: --seq-length 6 … multiple"),
        (f"{TENSOR} --ds-sequence-parallel-size 2", 4, "heads 2 … multiple of 4"),
        (
            "--num-attention-heads 4 --group-query-attention --num-query-groups 1 "
            "--ds-sequence-parallel-size 2",
            2,
            "--num-query-groups 1 … multiple of 2",
        ),
        (
            f"{TENSOR} --num-attention-heads 4 --sequence-parallel --ds-sequence-parallel-size 2",
            4,
            "both … sequence",
        ),
        ("--ds-sequence-parallel-size 2", 3, "multiple of 2 processes … 3"),
        ("--ds-sequence-parallel-size 0", 1, "sequence-parallel-size 0 … 1"),
        ("--context-parallel-size 2", 3, "multiple of 2 processes … 3"),
        (f"{CONTEXT} --ds-sequence-parallel-size 2", 4, "both … sequence"),
        (f"{CONTEXT} --cp-comm-type all_gather", 2, "all_gather … keys … every rank"),
        (f"{CONTEXT} --cp-comm-type p2p a2a", 2, "--cp-comm-type p2p a2a … layers"),
        (f"{CONTEXT} --cp-comm-type ring", 2, "ring … p2p or a2a"),
        (f"{TENSOR} {CONTEXT} --cp-comm-type a2a", 4, "write --context-parallel-size 2"),
        (f"{TENSOR} {CONTEXT} --sequence-parallel", 4, "6 … multiple of 4"),
        (f"{CONTEXT} --attention-impl flex --kv-channels 16", 2, "--attention-impl"),
        (f"{CONTEXT} --compile", 2, "--compile … ring"),
        (f"{CONTEXT} --num-experts 2", 2, "experts … --context-parallel-size 2"),
    ],
)
def test_layouts_that_do_not_fit_are_told(line, world_size, output):
    with problem(output):
        plan_of(line, world_size)


GROUPED = "--num-attention-heads 4 --group-query-attention --num-query-groups 1"


@pytest.mark.parametrize(
    ("flags", "objective"),
    [
        ("--num-experts 2 --disable-moe-token-dropping", "gpt"),
        ("--decoder-seq-length 4", "t5"),
        ("--num-layers 6 --retro-chunk-length 2", "retro"),
    ],
)
def test_networks_without_a_ring_are_not_advised_to_take_one(flags, objective):
    for layout in (GROUPED, f"{TENSOR} --num-attention-heads 4 --sequence-parallel"):
        line = f"{flags} {layout} --ds-sequence-parallel-size 2"
        with pytest.raises(ConfigError) as raised:
            tiny_plan(*line.split(), world_size=4, objective=objective)
        assert "--context-parallel-size" not in str(raised.value)
