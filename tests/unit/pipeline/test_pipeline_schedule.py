"""Interleaved 1F1B and zero bubble: idle share, buffers, order of messages, and that no exchange waits forever."""

from collections import Counter, defaultdict
from dataclasses import replace
from runpy import run_path

import pytest
from source import REPOSITORY
from tiny import tiny_plan

from megatron.pipeline.schedule import (
    Grid,
    idle_share,
    num_buffers,
    program_of,
    simulated_times,
    step_time,
)
from megatron.planner.memory import memory_of_stages, micro_batches_under_way
from megatron.planner.speed import bubble_of, step_flops
from megatron.planner.stages import stages_of
from megatron.planner.summary import run_lines
from megatron.planner.traffic import traffic_of

COST = {"forward": 1.0, "backward": 2.0}
SPLIT_COST = {"forward": 1.0, "backward": 1.0, "weight": 1.0}
SIZES = [(p, v, m) for p in (2, 3, 4, 8) for v in (2, 3, 4) for m in (1, 2, 3, 8, 24)]


SPLIT_SIZES = [
    *((p, 1, m) for p in (2, 3, 4, 5, 8) for m in (1, 2, 3, 8, 24)),
    *((p, v, m) for p in (2, 3, 5, 8) for v in (2, 3, 4) for m in (p, 3 * p)),
]


def grid_of(ranks, chunks, micro_batches, splits_backward=False):
    return Grid(
        ranks=ranks, chunks=chunks, micro_batches=micro_batches, splits_backward=splits_backward
    )


def messages_of(grid, *, trains):
    """Return for each rank its exchanges: messages sent and received, and inputs of unknown shape.

    A message is (sender, receiver, which one of theirs); its meaning comes with it.
    """
    exchanges = []
    for rank in range(grid.ranks):
        sent, received, known = defaultdict(int), defaultdict(int), set()
        own = []
        for iteration in program_of(grid, rank, trains=trains):
            sends, receives, unknown = [], [], []
            for each in iteration.sends:
                step = 1 if each.direction == "forward" else -1
                peer = (rank + step) % grid.ranks
                place = grid.virtual_stage(rank, each.chunk) + step
                sends.append(((rank, peer, sent[peer]), (each.direction, place)))
                sent[peer] += 1
            for each in iteration.receives:
                peer = (rank - (1 if each.direction == "forward" else -1)) % grid.ranks
                place = grid.virtual_stage(rank, each.chunk)
                receives.append(((peer, rank, received[peer]), (each.direction, place)))
                received[peer] += 1
                if each.direction == "forward" and place not in known:
                    known.add(place)
                    unknown.append(place)
            own.append((sends, receives, unknown))
        exchanges.append(own)
    return exchanges


def left_waiting(exchanges):
    """Return the ranks that never end, if each message waits for both of its ends.

    Where the shape of an input is unknown, sends must be complete before receives are posted, as on
    one CUDA stream, and its sender must have come to its exchange.
    """
    announced, sent, received = set(), set(), set()

    def rank(own):
        for sends, receives, unknown in own:
            announced.update(place for _, (direction, place) in sends if direction == "forward")
            out, into = {each for each, _ in sends}, {each for each, _ in receives}
            sent.update(out)
            while unknown and not (announced.issuperset(unknown) and received >= out):
                yield
            received.update(into)
            while not (received >= out and sent >= into):
                yield

    running = dict(enumerate(map(rank, exchanges)))
    while running:
        before = len(announced), len(sent), len(received), len(running)
        for number in [*running]:
            if next(running[number], "ended") == "ended":
                del running[number]
        if before == (len(announced), len(sent), len(received), len(running)):
            break
    return [*running]


def require_order(grid, *, trains):
    """Fail unless all exchanges end, and both ends of a pair of ranks agree on the order of messages."""
    exchanges = messages_of(grid, trains=trains)
    assert left_waiting(exchanges) == []
    sends = {key: what for own in exchanges for each in own for key, what in each[0]}
    receives = {key: what for own in exchanges for each in own for key, what in each[1]}
    assert sends == receives
    inner = grid.ranks * grid.chunks - 1
    assert len(sends) == inner * grid.micro_batches * (2 if trains else 1)


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_nothing_deadlocks_and_both_ends_agree_on_the_order(p, v, m):
    for trains in (False, *([True] if m % p == 0 else [])):
        require_order(grid_of(p, v, m), trains=trains)


@pytest.mark.parametrize(("p", "v", "m"), SPLIT_SIZES)
def test_a_split_backward_pass_leaves_a_third_of_the_bubble(p, v, m):
    grid = grid_of(p, v, m, splits_backward=True)
    require_order(grid, trains=True)
    times = simulated_times(grid, cost=SPLIT_COST)
    assert idle_share(times) == pytest.approx(grid.bubble)
    if m >= p:
        assert grid.idle == pytest.approx(replace(grid, splits_backward=False).idle / 3)
        # A rank is idle for p - 1 passes, each of a chunk.
        assert step_time(times) * v == pytest.approx(3 * v * m + p - 1)
    for rank in range(p):
        passes = [*grid.passes(rank)]
        # Forward and backward passes in the order of 1F1B, so with as many micro-batches in flight.
        others = [each for each in passes if each.direction != "weight"]
        assert others == [*replace(grid, splits_backward=False).passes(rank)]
        # Weight passes in the order of backward passes, each behind its own, few put off.
        weights = [each._replace(direction="backward") for each in passes if each not in others]
        assert weights == [each for each in passes if each.direction == "backward"]
        waiting = 0
        for each in passes:
            if each.direction == "forward":
                assert waiting <= grid.passes_put_off(rank) <= rank
            waiting += {"forward": 0, "backward": 1, "weight": -1}[each.direction]
            assert 0 <= waiting <= rank + 1


def test_the_simulation_finds_deadlocks():
    assert left_waiting(messages_of(grid_of(3, 2, 4), trains=True))
    with pytest.raises(ValueError, match="deadlocks"):
        simulated_times(grid_of(5, 2, 7), cost=COST)


@pytest.mark.parametrize(
    ("p", "v", "m", "buffers"),
    [
        (2, 2, 4, [6, 4]),
        (2, 4, 4, [10, 8]),
        (4, 2, 8, [12, 10, 8, 6]),
        (4, 4, 8, [20, 18, 16, 14]),
        (8, 2, 32, [24, 22, 20, 18, 16, 14, 12, 10]),
    ],
)
def test_idle_share_and_buffers_are_as_planned(p, v, m, buffers):
    grid = grid_of(p, v, m)
    times = simulated_times(grid, cost=COST)
    assert idle_share(times) == pytest.approx(grid.bubble) == (p - 1) / (v * m + p - 1)
    assert step_time(times) == pytest.approx(3 * m + 3 * (p - 1) / v)
    assert [num_buffers(program_of(grid, rank)) for rank in range(p)] == buffers
    # One slot has an input that came ahead.
    assert [sum(grid.most_in_flight(rank)) + 1 for rank in range(p)] == buffers


def test_slots_hold_one_micro_batch_at_a_time():
    for rank in range(4):
        held = {}
        for iteration in program_of(grid_of(4, 2, 8), rank):
            for each, slot in iteration.passes:
                key = each.chunk, each.micro_batch
                assert held.setdefault(slot, key) == key
                if each.direction == "backward":
                    held[slot] = None
            ended = {slot for slot, key in held.items() if key is None}
            assert not ended & {each.buffer for each in iteration.receives}
            for slot in ended:
                del held[slot]


def test_one_chunk_is_1f1b():
    times = simulated_times(grid_of(4, 1, 8), cost=COST)
    assert idle_share(times) == pytest.approx(3 / 11)
    assert grid_of(4, 1, 8).last_gradients(0) == [7]
    assert grid_of(4, 2, 8).last_gradients(0) == [11, 15]


def test_gradients_of_a_split_backward_pass_are_complete_after_both_halves():
    grid = grid_of(2, 1, 4, splits_backward=True)
    assert grid.last_gradients(0) == [6, 7]  # B0 W0 B1 W1 B2 W2 B3 W3
    assert grid.last_gradients(1) == [5, 7]  # B0 B1 W0 B2 W1 B3 W2 W3


def test_slots_of_a_split_backward_pass():
    """As in the schedule that it splits, with at most one more for an input that came ahead."""
    for p, v, m in ((2, 1, 8), (4, 1, 8), (4, 2, 8), (8, 2, 32)):
        grid = grid_of(p, v, m, splits_backward=True)
        for rank in range(p):
            program = program_of(grid, rank)
            assert num_buffers(program) - sum(grid.most_in_flight(rank)) in (0, 1, 2)
            done = Counter(each.direction for entry in program for each, _ in entry.passes)
            assert done == dict.fromkeys(SPLIT_COST, v * m)


def test_messages_that_take_time_lengthen_a_step():
    grid = grid_of(2, 2, 4)
    assert step_time(simulated_times(grid, cost=COST, transfer=0.5)) > 13.5


STAGES = (
    *("--pipeline-model-parallel-size", "4", "--num-layers", "16", "--global-batch-size", "16"),
    *("--untie-embeddings-and-output-weights", "--hidden-size", "64"),
)


def test_the_planner_knows_bubble_memory_and_messages_of_chunks():
    plain = tiny_plan(*STAGES, world_size=4)
    chunked = tiny_plan(*STAGES, "--num-layers-per-virtual-pipeline-stage", "2", world_size=4)
    assert chunked.parallel.chunks == 2
    assert (bubble_of(plain), bubble_of(chunked)) == (3 / 11, pytest.approx(3 / 19))
    stages = stages_of(chunked)
    assert [stage.layers for stage in stages[:2]] == [(1, 2, 9, 10), (3, 4, 11, 12)]
    assert [micro_batches_under_way(chunked, stage) for stage in stages] == [5.5, 4.5, 3.5, 2.5]
    memory, before = memory_of_stages(chunked), memory_of_stages(plain)
    assert [each.weights for each in memory] == [each.weights for each in before]
    # Instead of 3 micro-batches 4.5, and a second tensor that is sent.
    assert 1.5 < memory[1].activations / before[1].activations < 1.7
    assert traffic_of(chunked, 8).pipeline.total == 2 * traffic_of(plain, 8).pipeline.total


def test_the_planner_knows_the_zero_bubble():
    plain = tiny_plan(*STAGES, world_size=4)
    split = tiny_plan(*STAGES, "--enable-zbh1-pipeline", world_size=4)
    assert bubble_of(split) == pytest.approx(1 / 9)
    layout = next(line for line in run_lines(split) if line.startswith("layout: "))
    assert "pp 4 (zero bubble) * " in layout
    memory, before = memory_of_stages(split), memory_of_stages(plain)
    assert [each.weights for each in memory] == [each.weights for each in before]
    # Of 8 micro-batches stage r puts the weight passes of r off: inputs and output gradients of
    # 4 layers, 24 features of 8 each for 6 tokens and 2 samples.
    spec, tokens = split.model, split.batch.micro_batch_size * split.model.seq_length
    each = 4 * 4 * tokens * (8 * spec.hidden_size + 2 * spec.mlp.ffn_hidden_size)
    found = [own.activations - other.activations for own, other in zip(memory, before, strict=True)]
    ahead = 4 * 4 * tokens * spec.hidden_size  # messages in transit
    assert found == [ahead, each + ahead, 2 * each + ahead, 3 * each + ahead]
    assert traffic_of(split, 8).pipeline == traffic_of(plain, 8).pipeline
    assert step_flops(split, recomputed=False) == step_flops(plain, recomputed=False)


def test_table_and_picture_of_the_docs_are_those_of_the_simulation():
    tool = run_path(str(REPOSITORY / "benchmarks" / "pipeline_schedules.py"))
    page = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
    assert "\n".join(tool["table_lines"]()) in page
    shown = (REPOSITORY / "docs" / "pipeline_schedules.svg").read_text(encoding="utf-8")
    assert shown == tool["picture"]()
