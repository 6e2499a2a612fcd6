"""Layouts that a search finds, and the kinds of GPU that it knows."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from planned_runs import A100, BLOOM_176B, SIZES, bloom, planned
from problems import problem
from tiny import tiny_config

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.planner.calibration import ROOFLINE
from megatron.planner.devices import DEVICES, GIB, RESERVED_BYTES, device_of, known_device
from megatron.planner.layouts import Layout, layouts_of, places
from megatron.planner.memory import memory_of_stages
from megatron.planner.search import Fitting, Found, Refusal, faster_micro_batch, ranked, search
from megatron.planner.speed import speed_of
from megatron.planner.summary import search_lines


@pytest.fixture(scope="module")
def found():
    """Layouts of BLOOM on its GPUs, at its last batch size."""
    config, _ = parse_config(BLOOM_176B.split())
    config = replace(config, training=replace(config.training, rampup_batch_size=None))
    return search(config, num_gpus=384, vocab_size=250680, device=A100)


def test_the_search_ranks_what_fits_and_groups_what_does_not(found):
    assert len(found.fitting) > 10
    times = [fitting.ranked_s for fitting in found.fitting]
    assert all(later > 0.99 * earlier for earlier, later in pairwise(times))
    assert all(f.peak_bytes < 77 * GIB for f in found.fitting)
    output = {refusal.why: refusal.where for refusal in found.refused}
    assert output["more than the 8 GPUs of a node"] == ("tp 16",)
    assert "dp 3" in output["global batch size 2048 is not a multiple of micro-batch * replicas"]
    (large,) = (where for why, where in output.items() if "needs more than the 76.2 GiB" in why)
    assert "tp 1 pp 3" in large
    # The flags of a layout ask for that layout.
    best = found.fitting[0].layout
    decided = planned(
        f"{BLOOM_176B} {best.flags()}".replace("--checkpoint-activations", "", 1).replace(
            "--rampup-batch-size 192 16 9_765_625", ""
        ),
        world_size=384,
        vocab_size=250680,
    )
    assert (decided.parallel.tensor, decided.parallel.pipeline) == (best.tensor, best.pipeline)
    assert decided.recompute.granularity == best.recompute
    assert speed_of(decided, A100).step_s == pytest.approx(
        found.fitting[0].speed.step_s, rel=0.02
    )  # the search cuts stages by layers alone


def test_of_equally_fast_layouts_the_lowest_zero_stage_comes_first():
    speed = speed_of(bloom(), A100)
    layout = Layout(
        tensor=1, pipeline=1, data=8, zero_stage=1, micro_batch_size=1, recompute="none"
    )
    times = {3: 1.0, 1: 1.005, 2: 1.02}
    fitting = [
        Fitting(
            layout=replace(layout, zero_stage=stage),
            speed=replace(speed, step_s=step_s),
            peak_bytes=1,
        )
        for stage, step_s in times.items()
    ]
    assert [one.layout.zero_stage for one in ranked(fitting)] == [1, 3, 2]


def test_a_nearly_full_layout_comes_behind_one_with_room_unless_it_is_much_faster():
    speed = speed_of(bloom(), A100)
    layout = Layout(
        tensor=1, pipeline=1, data=8, zero_stage=1, micro_batch_size=1, recompute="none"
    )
    tight, roomy, slow = (
        Fitting(
            layout=replace(layout, tensor=tensor),
            speed=replace(speed, step_s=step_s),
            peak_bytes=1,
            is_tight=is_tight,
        )
        for tensor, step_s, is_tight in ((1, 1.0, True), (2, 1.03, False), (4, 1.1, False))
    )
    assert ranked([slow, tight, roomy]) == [roomy, tight, slow]
    _, line, *_ = search_lines(Found((tight,), ()), most=1, calibration=ROOFLINE)
    assert "(nearly full)" in line


def test_the_search_tries_chunks_of_pipelines():
    network = "--num-layers 16 --hidden-size 8192 --num-attention-heads 64 --seq-length 2048"
    config, _ = parse_config(
        f"{network} --lr 1e-4 --bf16 --micro-batch-size 1 --global-batch-size 64 --data-path D --train-iters 10".split()
    )
    found = search(config, num_gpus=32, vocab_size=50257, device=A100)
    times = {one.layout: one.speed.step_s for one in found.fitting}
    chunked = [layout for layout in times if layout.chunks > 1]
    assert chunked
    assert all(16 // layout.pipeline % layout.chunks == 0 for layout in chunked)
    assert all(times[one] < times[replace(one, chunks=1)] for one in chunked if one.chunks == 2)
    flags = f"--num-virtual-stages-per-pipeline-rank {chunked[0].chunks}"
    assert flags in chunked[0].flags()
    assert f"({chunked[0].chunks} chunks each)" in str(chunked[0])


def test_larger_micro_batches_than_one_that_does_not_fit_are_not_planned(monkeypatch):
    planned_layouts = []

    def count_plans(*args, **keywords):
        planned_layouts.append(args)
        return plan(*args, **keywords)

    monkeypatch.setattr("megatron.planner.search.plan", count_plans)
    config, _ = parse_config(
        f"{SIZES['2.7b']} --seq-length 2048 --lr 1e-4 --fp16 --micro-batch-size 1 "
        "--global-batch-size 16 --data-path D --train-iters 10".split()
    )
    found = search(config, num_gpus=1, vocab_size=50257, device=device_of("v100-16gb"))
    (refusal,) = found.refused
    assert (found.fitting, refusal.count) == ((), 36)  # 4 micro-batches, 3 stages, 3 recomputations
    assert len(planned_layouts) == 9


@pytest.mark.parametrize(("share", "size"), [(0.94, 2), (0.96, None)])
def test_a_micro_batch_that_nearly_fills_the_memory_is_not_advised(share, size):
    config, _ = parse_config(
        f"{SIZES['345m']} --seq-length 2048 --lr 1e-4 --fp16 --micro-batch-size 1 "
        "--global-batch-size 2 --data-path D --train-iters 10".split()
    )
    decide = partial(plan, world_size=1, vocab_size=50257, device="cuda")
    larger = decide(replace(config, training=replace(config.training, micro_batch_size=2)))
    (memory,) = memory_of_stages(larger)
    gib = (memory.total / share + RESERVED_BYTES) / GIB
    device = replace(device_of("v100-16gb"), memory_gib=gib)
    estimate = partial(speed_of, device=device)
    found = faster_micro_batch(config, decide(config), device, decide=decide, estimate=estimate)
    assert (found and found[0]) == size


def test_what_does_not_run_is_listed_in_part():
    where = tuple(f"tp {n}" for n in range(20))
    lines = [
        *search_lines(
            Found((), (Refusal("large", where, where, 40),)), most=2, calibration=ROOFLINE
        )
    ]
    assert lines[1:-1] == [
        "40 do not run (tp 0, tp 1, 18 more): large",
        "  tp 0",
        "  tp 1",
        "  and some of 18 more sizes (--show N lists N)",
    ]


def test_larger_micro_batches_of_evaluation_take_memory():
    network = f"{SIZES['1.3b']} --seq-length 2048 --lr 1e-4 --bf16 --data-path D --train-iters 10"
    common = f"{network} --micro-batch-size 1 --global-batch-size 64 --checkpoint-activations"
    small, like, large, larger = (
        memory_of_stages(planned(f"{common} {flags}", world_size=1))[0].total
        for flags in (
            "",
            "--eval-micro-batch-size 1",
            "--eval-micro-batch-size 32",
            "--eval-micro-batch-size 64",
        )
    )
    logits = 2048 * 50304 * 2  # of a sample, in the 16 bits that kernels read
    assert small == like
    assert large > small
    assert larger - large >= 32 * logits


def test_what_no_layout_mends_is_refused_by_the_search():
    with pytest.raises(ConfigError) as refused:
        search(tiny_config("--clip-grad", "-1"), num_gpus=2, vocab_size=11, device=A100)
    assert refused.value.problems == ("--clip-grad -1.0 must be at least 0",)
    with problem("v100-16gb … bf16 … --fp16"):
        search(tiny_config("--bf16"), num_gpus=2, vocab_size=11, device=device_of("v100-16gb"))


def test_the_search_tells_layouts_that_do_not_run_from_those_that_do(found):
    fit = {f"tp {one.layout.tensor} pp {one.layout.pipeline}" for one in found.fitting}
    for refusal in found.refused:
        assert fit.isdisjoint(refusal.where)
        assert all(" with " in part for part in refusal.partly)
    layouts = [*layouts_of(8, 24)]
    several = [one for one in layouts if (one.tensor, one.pipeline) == (1, 1)]
    some = [one for one in several if one.zero_stage < 3 and one.recompute != "full"]
    some = [one for one in some if one.micro_batch_size > 2]
    some += [one for one in layouts if one.tensor == 8]
    assert [*places(some, several, layouts, "tp pp")] == [
        ("tp 1 pp 1", "ZeRO 1/2 recompute none/selective micro-batch 4/8"),
        ("tp 8 pp 1", ""),
    ]


def test_the_search_divides_experts():
    network = f"{SIZES['1.3b']} --seq-length 2048 --num-experts 48 --expert-interval 2 --lr 1e-4"
    config, _ = parse_config(
        f"{network} --bf16 --micro-batch-size 1 --global-batch-size 8 --data-path D "
        "--train-iters 10".split()
    )
    found = search(config, num_gpus=8, vocab_size=50257, device=A100)
    best = found.fitting[0].layout
    assert f"--moe-expert-parallel-size {best.expert}" in best.flags()
    assert f" ep {best.expert} " in str(best)
    without_others = (
        one.layout.expert
        for one in found.fitting
        if (one.layout.tensor, one.layout.pipeline) == (1, 1) and one.layout.zero_stage == 1
    )
    assert {*without_others} == {4, 8}  # more experts on a GPU do not fit
    partly = [part for refusal in found.refused for part in refusal.partly]
    assert any(part.startswith("tp 1 pp 1 ep 2 with ZeRO 1") for part in partly)
    assert {layout.expert for layout in layouts_of(8, 24, 48) if layout.zero_stage == 3} == {1}


def test_the_search_tries_full_experts_on_tensor_ranks():
    # 64 narrow experts: rows that arrive are gathered for nothing if ranks share each of them.
    network = "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192"
    config, _ = parse_config(
        f"{network} --num-experts 64 --moe-ffn-hidden-size 768 --topk 8 --expert-interval 1 "
        "--seq-length 4096 --lr 1e-4 --bf16 --micro-batch-size 1 --global-batch-size 8 "
        "--data-path D --train-iters 10 --disable-moe-token-dropping".split()
    )
    found = search(config, num_gpus=8, vocab_size=50257, device=A100)
    times = {one.layout: one.speed.step_s for one in found.fitting}
    pairs = [
        (time, times[shared])
        for layout, time in times.items()
        if layout.expert_tensor and (shared := replace(layout, expert_tensor=0)) in times
    ]
    assert pairs
    assert all(alone < shared for alone, shared in pairs)
    full = next(layout for layout in times if layout.expert_tensor)
    assert f" ep {full.expert} etp 1 " in str(full)
    assert full.flags().count("--expert-tensor-parallel-size 1") == 1


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with problem(", ".join(DEVICES)):
        device_of("abacus")


def test_a_board_for_pcie_that_computes_as_fast_sends_slower():
    board = known_device("NVIDIA A100 80GB PCIe", int(79.2 * GIB))
    assert board == replace(A100, node_gb_s=board.node_gb_s)
    assert board.node_gb_s < A100.node_gb_s / 8


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H200", 139.8, "h200"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32gb"),
    ],
)
def test_a_gpu_is_known_by_what_it_calls_itself(name, gib, known):
    assert known_device(name, int(gib * GIB)).name == known
    slower = ("Tesla V100-PCIE-32GB", "NVIDIA H100 PCIe", "NVIDIA H200 NVL")
    for other in ("Abacus 3000", "NVIDIA GB200", *slower):
        assert known_device(other, int(gib * GIB)) is None
