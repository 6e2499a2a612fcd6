"""Bytes that a step sends, and what hides them, against counts by hand."""

from dataclasses import replace

import pytest
from planned_runs import A100, SIZES, planned
from tiny import tiny_plan

from megatron.planner.memory import weights_of
from megatron.planner.speed import CONTENTION, NETWORK_SHARE, speed_of
from megatron.planner.stages import stages_of
from megatron.planner.traffic import Volume, traffic_of


def test_traffic_of_rings():
    flags = ("--tensor-model-parallel-size", "2", "--zero-stage", "0")
    decided = tiny_plan(*flags, world_size=4)
    traffic = traffic_of(decided, 1)
    hidden = 4 * 2 * 6 * 8  # bytes of [s, b, h]
    # Two layers, the embedding and the head, as many all-reduces backward as forward, twice half a
    # tensor per rank.
    once = (2 * 2 + 1) * 2 * hidden / 2
    assert traffic.tensor == Volume(exposed=once, backward=once)
    held = weights_of(decided, stages_of(decided)[0]).total
    assert traffic.data == Volume(exposed=2 * held * 4 / 2)
    assert (traffic.pipeline, traffic.sequence) == (Volume(), Volume())


def test_a_table_on_two_stages_is_summed_and_sent_in_each_step():
    flags = ("--pipeline-model-parallel-size", "2", "--num-layers", "2", "--bf16")
    tied, untied = (
        traffic_of(tiny_plan(*flags, *more, world_size=2), 3).pipeline
        for more in ((), ("--untie-embeddings-and-output-weights",))
    )
    table = 12 * 8
    assert tied.exposed - untied.exposed == table * (4 + 2)  # gradients in fp32, weights in bf16
    alone = traffic_of(tiny_plan("--bf16", world_size=2), 3).pipeline
    assert alone.exposed == 0


def test_gradients_and_weights_hide_beside_the_passes():
    def data(*flags, number=4, **sizes):
        return traffic_of(tiny_plan(*flags, **{"world_size": 4} | sizes), number).data

    untied = ("--untie-embeddings-and-output-weights", "--zero-reduce-bucket-size", "100")
    untied += ("--zero-allgather-bucket-size", "100")
    held = weights_of(tiny_plan(*untied, "--bf16"), stages_of(tiny_plan(*untied))[0]).total
    found = data(*untied, "--bf16", "--zero-stage", "1")
    # Of a ring of 4 ranks each sends 3/4.
    hidden = 3 / 4 * (held - 100)
    assert found.exposed == pytest.approx(3 / 4 * 600)
    assert (found.forward, found.backward) == pytest.approx((2 * hidden, 4 * hidden))
    # A tied table is complete at the end.
    tied = data(*untied[1:], "--bf16", "--zero-stage", "1")
    assert tied.exposed == pytest.approx(3 / 4 * (600 + 4 * 12 * 8))
    experts = (*untied, "--bf16", "--num-experts", "2", "--expert-interval", "1")
    divided = (*experts, "--moe-expert-parallel-size", "2")
    assert data(*experts).backward > data(*divided).backward > 0
    # Muon's matrices are one bucket.
    assert data(*untied, "--bf16", "--optimizer", "muon").backward == 0
    first = data(*untied, "--zero-stage", "1")
    assert (first.forward, first.backward) == (0, 4 * (held - 100))
    assert first.exposed == 4 * 100 + 4 * held * 3 / 4
    second = data(*untied, "--zero-stage", "2")
    assert second.total == 4 * 4 * held + 4 * held * 3 / 4
    third = data("--zero-stage", "3")
    assert third.exposed == 0
    assert third.backward == third.forward  # gradients alone: all weights stay
    staged = ("--pipeline-model-parallel-size", "2", "--zero-stage", "1")
    assert data(*staged).backward == 0
    assert data(*staged, *untied[1:], "--bf16").backward > 0
    assert data("--bf16", "--zero-stage", "1", world_size=1) == Volume()


def test_traffic_of_experts():
    flags = ("--num-experts", "4", "--expert-interval", "1", "--topk", "2", "--zero-stage", "1")
    flags += ("--disable-moe-token-dropping", "--checkpoint-activations")
    apart, together = (
        tiny_plan(*flags, "--moe-expert-parallel-size", size, world_size=4) for size in "41"
    )
    rows = 2 * 2 * 6  # choices of the tokens of a micro-batch
    # To the experts and back; forward, again for the backward pass, and backward; in two layers.
    exchanges = 2 * 3 * 2
    sent = traffic_of(apart, 3)
    assert sent.experts == Volume(exposed=3 * exchanges * rows * 8 * 4 * 3 / 4)
    assert traffic_of(together, 3).experts == Volume()
    sequence = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    halves = tiny_plan(*flags, *sequence, "--moe-expert-parallel-size", "4", world_size=8)
    assert traffic_of(halves, 3).experts == Volume(exposed=sent.experts.exposed / 2)
    tensor, full = ("--tensor-model-parallel-size", "2"), ("--expert-tensor-parallel-size", "1")
    dense, shared, alone = (
        tiny_plan(*flags, *tensor, "--moe-expert-parallel-size", size, *more, world_size=8)
        for size, *more in (("1",), ("4",), ("4", *full))
    )
    assert (
        traffic_of(shared, 3).experts
        == traffic_of(alone, 3).experts
        == traffic_of(halves, 3).experts
    )
    # Two ranks that share an expert gather the rows that arrive, each half of all.
    gathered = 3 * exchanges * rows * 8 * 4 / 2
    without = traffic_of(dense, 3).tensor.exposed
    assert traffic_of(shared, 3).tensor.exposed == without + gathered
    assert traffic_of(alone, 3).tensor.exposed == without
    # Twice as wide, each on two ranks instead of one.
    of_stage = [weights_of(plan, stages_of(plan)[0]) for plan in (shared, alone)]
    biases = 2 * 8  # behind the experts, on all ranks; in two layers
    assert of_stage[1].experts == 2 * of_stage[0].experts - biases
    assert of_stage[1].dense == of_stage[0].dense
    assert (shared.parallel.copies_of_experts, alone.parallel.copies_of_experts) == (1, 2)
    # With an expert on each rank there is nothing to reduce for experts, and no copy to gather.
    held = weights_of(together, stages_of(together)[0])
    assert weights_of(apart, stages_of(apart)[0]).experts == held.experts / 4
    per_weight = 4 + 4 * 3 / 4
    assert sent.data.total == per_weight * held.dense
    assert traffic_of(together, 3).data.total == per_weight * held.total
    dropping = (word for word in flags if "dropping" not in word)
    half = ("--moe-train-capacity-factor", "0.5", "--moe-expert-parallel-size", "4")
    assert traffic_of(tiny_plan(*dropping, *half, world_size=4), 3).experts.total == (
        sent.experts.total / 2
    )


def test_hidden_communication_takes_little_time_until_it_is_longer_than_what_hides_it():
    flags = f"--bf16 --zero-stage 1 {SIZES['1.3b']} --seq-length 2048 --lr 1e-4 --data-path D"
    flags += " --train-iters 10 --micro-batch-size 8 --global-batch-size 128"
    decided = planned(flags, world_size=16)
    data = traffic_of(decided, 1).data
    assert data.exposed < data.backward
    endless, slow = (replace(A100, network_gb_s=each) for each in (1e9, A100.network_gb_s / 100))
    computed = speed_of(decided, endless).step_s
    beside = speed_of(decided, A100).step_s - computed
    sent = data.exposed + CONTENTION * (data.total - data.exposed)
    assert beside == pytest.approx(sent / (1e9 * A100.network_gb_s * NETWORK_SHARE), rel=0.01)
    beside = speed_of(decided, slow).step_s - computed
    assert data.exposed < beside * 1e9 * slow.network_gb_s * NETWORK_SHARE < data.total


def test_traffic_and_time_of_a_ring_of_keys_and_values():
    flags = ("--context-parallel-size", "2", "--seq-length", "8", "--max-position-embeddings", "8")
    decided = tiny_plan(*flags, world_size=2)
    kept = 4 * 2 * 4 * 8  # bytes of the keys of 4 positions, as wide as the hidden size
    # Two layers; keys and values once forward, they and their gradients backward.
    assert traffic_of(decided, 1).sequence.total == 2 * 3 * 2 * kept
    long = ("--seq-length", "65536", "--max-position-embeddings", "65536", "--bf16")
    long += ("--kv-channels", "128", "--global-batch-size", "2")
    ring, ulysses = (
        speed_of(tiny_plan(*long, *flags, world_size=2), A100).step_s
        for flags in (flags[:2], ("--ds-sequence-parallel-size", "2"))
    )
    assert ring < ulysses  # its transfers travel beside attention
