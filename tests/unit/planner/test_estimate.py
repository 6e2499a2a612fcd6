"""What a run is expected to need: against published runs, DeepSpeed's partition and plain counts."""

import json
import os
import re

from problems import problem

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from dataclasses import replace
from itertools import pairwise

import pytest
from deepspeed.runtime.utils import partition_balanced
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config, tiny_plan

from megatron.common.errors import ConfigError, DataError
from megatron.config.architecture import partition
from megatron.config.config import parse_config
from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.config.plan.plan import plan
from megatron.planner.calibration import ROOFLINE, Calibration, read_calibration
from megatron.planner.devices import DEVICES, GIB, device_of, known_device
from megatron.planner.layouts import Layout, layouts_of, places
from megatron.planner.memory import (
    checkpoint_bytes,
    memory_of_stages,
    micro_batches_under_way,
    weights_of,
)
from megatron.planner.search import Fitting, faster_partition, obstacle, ranked, search
from megatron.planner.speed import (
    CONTENTION,
    NETWORK_SHARE,
    bubble_of,
    idle_of_stages,
    speed_of,
    step_flops,
)
from megatron.planner.stages import stages_of
from megatron.planner.summary import device_lines, memory_lines, run_lines, work_lines
from megatron.planner.traffic import Volume, traffic_of

A100 = device_of("a100-80gb")
COMMON = "--lr 1e-4 --data-path D --checkpoint-activations --zero-stage 1"

# arXiv:2211.05100, table 3 and section 3.3.
BLOOM_176B = f"""{COMMON} --bf16
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
    --pp-partition-method type:transformer|embedding
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048
    --position-embedding-type alibi --embed-layernorm --pad-vocab-size-to 250880
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 2048
    --rampup-batch-size 192 16 9_765_625 --train-samples 220_000_000
"""
# arXiv:2104.04473, section 5.1: 175 billion on 1024 A100.
GPT3_175B = f"""{COMMON} --fp16
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --micro-batch-size 1 --global-batch-size 1536 --train-samples 146_484_375
"""
# arXiv:2201.11990, section 2.3: 530 billion on 280 nodes of 8 A100-80GB.
MT_NLG_530B = f"""{COMMON} --bf16
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 35
    --num-layers 105 --hidden-size 20480 --num-attention-heads 128 --seq-length 2048
    --micro-batch-size 1 --global-batch-size 1920 --train-samples 131_835_937
"""


def planned(command_line, *, world_size, vocab_size=50257):
    config, _ = parse_config(command_line.split())
    return plan(config, world_size=world_size, vocab_size=vocab_size, device="cuda")


def bloom():
    return planned(BLOOM_176B, world_size=384, vocab_size=250680)


@pytest.mark.parametrize(
    ("command_line", "world_size", "billions", "replicas"),
    [
        (BLOOM_176B, 384, 176.247, 8),
        (GPT3_175B, 1024, 174.6, 8),
        (MT_NLG_530B, 2240, 529.6, 8),
    ],
    ids=["BLOOM-176B", "GPT-3-175B", "MT-NLG-530B"],
)
def test_published_runs_fit_their_gpus(command_line, world_size, billions, replicas):
    decided = planned(command_line, world_size=world_size, vocab_size=50257)
    assert decided.model.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert decided.parallel.data == replicas
    assert obstacle(decided, A100) is None
    assert all(stage.layers for stage in stages_of(decided))


def test_a_run_that_is_too_large_for_its_gpus_is_told():
    halved = BLOOM_176B.replace("--pipeline-model-parallel-size 12", "")
    assert "needs more than the 76.2 GiB" in obstacle(planned(halved, world_size=32), A100)
    assert "no bf16" in obstacle(bloom(), device_of("v100-32gb"))


def test_blooms_checkpoint_is_as_large_as_it_was():
    assert checkpoint_bytes(bloom()) / 2**40 == pytest.approx(2.3, rel=0.05)


def test_mfu_without_what_a_causal_mask_excludes():
    for flags, pairs in (((), 64**2 / 2), (("--window-size", "15"), 64 * 16 - 16**2 / 2)):
        decided = tiny_plan("--seq-length", "64", "--max-position-embeddings", "64", *flags)
        speed, spec = speed_of(decided, A100), decided.model
        masked = 64 * min(64, spec.attention.window_of(1) or 64) - pairs
        ratio = speed.causal_mfu / speed.mfu
        each = 12 * spec.attention.query_features * spec.num_layers * masked
        assert ratio == pytest.approx(1 - each / spec.flops_per_sample(recompute=NOTHING))
        assert ratio < 1


SIZES = {
    "345m": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16",
    "1.3b": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16",
    "2.7b": "--num-layers 32 --hidden-size 2560 --num-attention-heads 32",
}


def on_one_gpu(size, micro, batch):
    flags = f"--seq-length 2048 --bf16 --lr 1e-4 --data-path D --train-iters 10 {SIZES[size]}"
    batches = f"--micro-batch-size {micro} --global-batch-size {batch}"
    dropout = "--attention-dropout 0 --hidden-dropout 0"
    return planned(f"{flags} {batches} {dropout}", world_size=1)


@pytest.mark.parametrize(
    ("size", "batch", "mfu"), [("345m", 8, 0.367), ("1.3b", 8, 0.446), ("2.7b", 4, 0.404)]
)
def test_the_roofline_gives_the_estimate_of_the_docs(size, batch, mfu):
    speed = speed_of(on_one_gpu(size, batch, batch), device_of("h100-80gb"))
    assert speed.mfu == pytest.approx(mfu, abs=0.01)


def test_larger_micro_batches_are_faster():
    h100 = device_of("h100-80gb")
    times = [speed_of(on_one_gpu("345m", micro, 64), h100).step_s for micro in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.1 * times[-1]
    config, _ = parse_config(
        f"{SIZES['345m']} --seq-length 2048 --bf16 --lr 1e-4 --data-path D --train-iters 10 "
        "--global-batch-size 64 --micro-batch-size 1".split()
    )
    found = search(config, num_gpus=1, vocab_size=50257, device=h100)
    assert found.fitting[0].layout.micro_batch_size == 8
    slower = search(config, num_gpus=1, vocab_size=50257, device=h100, slowdown=2.0)
    assert slower.fitting[0].speed.step_s == pytest.approx(2 * found.fitting[0].speed.step_s)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_stage_with_a_large_head_is_proposed_fewer_layers(chunks):
    """Between the head's cost, about four layers, and the step that the same stages take."""

    def decide(config):
        return plan(config, world_size=4, vocab_size=128_000, device="cuda")

    config, _ = parse_config(
        f"{SIZES['1.3b']} --seq-length 2048 --bf16 --lr 1e-4 --data-path D --train-iters 10 "
        "--global-batch-size 32 --micro-batch-size 1 --pipeline-model-parallel-size 4 "
        f"--num-virtual-stages-per-pipeline-rank {chunks}".split()
    )
    even = decide(config)
    ways = {"decide": decide, "estimate": lambda planned: speed_of(planned, A100)}
    flags, speed = faster_partition(config, even, A100, **ways)
    _, method, *given = flags.split()
    assert given == ["--num-virtual-stages-per-pipeline-rank", "2"][: 2 * chunks - 2]
    layers = [int(count) for count in method.removeprefix("layers:").split(",")]
    assert (sum(layers), len(layers)) == (24, 4 * chunks)
    assert layers[-1] < min(layers[:-1])
    assert speed.step_s < 0.95 * speed_of(even, A100).step_s
    idle = idle_of_stages(even)
    assert idle[3] == pytest.approx(min(idle)) and max(idle) > idle[3] + 0.1
    divided = replace(config.parallel, pp_partition_method=method)
    config = replace(config, parallel=divided)
    assert max(idle_of_stages(decide(config))) < max(idle)
    assert faster_partition(config, decide(config), A100, **ways) is None


def measured_table(path, slowdowns):
    """Write results of a GPU whose steps are so much longer than the roofline's."""
    rows = []
    for size, slowdown in slowdowns.items():
        step_s = speed_of(on_one_gpu(size, 4, 4), device_of("h100-80gb")).step_s
        flags = [*SIZES[size].split(), "--seq-length", "2048", "--bf16"]
        ours = {"seconds": slowdown * step_s}
        rows.append({"batch": 4, "flags": "", "all_flags": flags, "ours": ours})
    rows.append({"batch": 4, "flags": "--compile", "all_flags": [], "ours": {"seconds": 1.0}})
    rows.append({"batch": 4, "flags": "", "all_flags": [], "ours": {"error": "out of memory"}})
    card = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": int(79.1 * GIB)}
    path.write_text(json.dumps({"speed": {"device": card, "rows": rows}}))


def test_a_measured_table_calibrates_the_roofline(tmp_path):
    h100, table = device_of("h100-80gb"), tmp_path / "results.json"
    measured_table(table, {"345m": 1.2, "1.3b": 1.2 * 1.44})
    found = read_calibration(str(table), h100)
    assert found.slowdown == pytest.approx(1.44)
    assert "mean of 2 measured on NVIDIA H100" in found.source and "1.20 to 1.73" in found.source
    with problem(f"--measured {table} … H100 … --gpu a100-80gb"):
        read_calibration(str(table), A100)
    measured_table(table, {})
    with problem(f"--measured {table} … no row"):
        read_calibration(str(table), h100)
    table.write_text('{"speed": null}')
    with problem(f"{table} … read", DataError):
        read_calibration(str(table), h100)


def test_a_ramp_takes_as_long_as_its_steps():
    """Each of them has the pipeline's bubble, and sums its gradients, however small its batch."""
    sizes = range(512, 2049, 512)
    step_s = {}
    for size in sizes:
        flat = BLOOM_176B.replace("--rampup-batch-size 192 16 9_765_625", "")
        flat = flat.replace("--global-batch-size 2048", f"--global-batch-size {size}")
        step_s[size] = speed_of(planned(flat, world_size=384), A100).step_s
    ramp = BLOOM_176B.replace("192 16 9_765_625", "512 512 9_765_625")
    decided, consumed, run_s = planned(ramp, world_size=384), 0, 0.0
    while consumed < 220_000_000:
        size = decided.batch.size_at(consumed)
        consumed, run_s = consumed + size, run_s + step_s[size]
    assert speed_of(decided, A100).run_s == pytest.approx(run_s, rel=2e-5)
    assert run_s > step_s[2048] * 220e6 / 2048 + 10 * 3600


def test_an_mfu_that_is_given_decides_the_time():
    decided = bloom()
    speed = speed_of(decided, A100, mfu=0.4)
    assert speed.mfu == pytest.approx(0.4)
    assert speed.step_s == pytest.approx(
        step_flops(decided, recomputed=False) / (384 * 312e12 * 0.4)
    )
    assert speed.gpu_hours == pytest.approx(speed.step_s * 220e6 / 2048 * 384 / 3600)


def test_blooms_stages_and_micro_batches_are_those_of_one_forward_one_backward():
    decided = bloom()
    stages = stages_of(decided)
    assert [len(stage.layers) for stage in stages] == [5, *[6] * 10, 5]
    assert [micro_batches_under_way(decided, stage) for stage in stages] == [*range(12, 0, -1)]
    assert bubble_of(decided) == 11 / (128 + 11)
    memories = memory_of_stages(decided)
    assert memories[0].activations > memories[1].activations > memories[10].activations
    assert [stage.logits for stage in memories[:-1]] == [0] * 11
    # Three times two bytes for each token of a micro-batch and each quarter of the vocabulary, and
    # two inputs of the stage; in 32 bits where no kernel reads others, two bytes before the cast.
    tokens = 2 * 2048
    # And twice what the recomputation of five layers began with: their inputs, and ALiBi's bias.
    recomputed = 2 * (5 * tokens * 2 * 14336 + 28 * 2048**2 * 2)
    kept = tokens * (3 * 2 * 250880 // 4 + 2 * 2 * 14336) + recomputed
    assert memories[-1].logits == kept
    in_torch = planned(f"{BLOOM_176B} --kernels reference", world_size=384, vocab_size=250680)
    logits = memory_of_stages(in_torch)[-1].logits
    assert logits == tokens * ((3 * 4 + 2) * 250880 // 4 + 2 * 2 * 14336) + recomputed


def test_a_loss_in_chunks_keeps_gradients_in_place_of_logits():
    network = f"""{COMMON} --bf16 --num-layers 24 --hidden-size 1024 --num-attention-heads 16
        --seq-length 2048 --micro-batch-size 8 --global-batch-size 64 --train-samples 1000"""
    tokens, width, vocab = 8 * 2048, 1024, 50304
    for kernels, each, moments in (("auto", 2, 0), ("reference", 4, 4 + 2)):
        flags = f"{network} --kernels {kernels}"
        (full,) = memory_of_stages(planned(flags, world_size=1))
        (chunks,) = memory_of_stages(planned(f"{flags} --loss-chunk-tokens 2048", world_size=1))
        assert full.logits == each * tokens * vocab
        assert chunks.logits == 2 * tokens * width + 4 * vocab * width
        if moments:
            assert full.transient == moments * tokens * vocab
            assert chunks.transient == (each + moments) * 2048 * vocab


@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=14),
    parts=st.integers(1, 6),
)
def test_the_partition_is_deepspeeds(weights, parts):
    assert partition.partition_balanced(tuple(weights), parts) == [
        int(bound) for bound in partition_balanced(weights, parts)
    ]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm",
        "--disable-bias-linear --add-qkv-bias --group-query-attention --num-query-groups 1",
        "--embed-layernorm --qk-layernorm --position-embedding-type alibi",
        "--num-experts 4 --mlp-type residual --ffn-hidden-size 16",
    ],
)
def test_stages_hold_the_network_once(flags):
    decided = tiny_plan(*flags.split())
    (stage,) = stages_of(decided)
    assert weights_of(decided, stage).total == decided.model.num_parameters


@pytest.mark.parametrize("method", ["type:transformer", "uniform", "parameters"])
def test_two_stages_hold_the_network_and_a_second_table(method):
    flags = ("--pipeline-model-parallel-size", "2", "--num-layers", "6")
    decided = tiny_plan(*flags, "--pp-partition-method", method, world_size=2)
    stages = stages_of(decided)
    assert [number for stage in stages for number in stage.layers] == [1, 2, 3, 4, 5, 6]
    table = decided.model.vocabulary.padded_vocab_size * decided.model.hidden_size
    held = sum(weights_of(decided, stage).total for stage in stages)
    assert held == decided.model.num_parameters + table


def test_zero_divides_more_with_every_stage():
    def kept(stage, *flags):
        flags = ("--bf16", "--zero-stage", str(stage), "--zero-reduce-bucket-size", "1000", *flags)
        (memory,) = memory_of_stages(tiny_plan(*flags, world_size=4))
        return memory.weights + memory.gradients + memory.optimizer

    weights = tiny_plan().model.num_parameters
    assert kept(1) == weights * (2 + 4 + 12 // 4)
    assert kept(2) == weights * (2 + (4 + 12) // 4)
    # Offloaded, the optimizer and the sums of gradients are on the host.
    (memory,) = memory_of_stages(tiny_plan("--bf16", "--cpu-optimizer", "--cpu_torch_adam"))
    assert (memory.optimizer, memory.host) == (0, weights * (12 + 4))


def test_buffers_that_nothing_is_written_to_take_no_memory_on_a_cpu():
    decided = tiny_plan("--zero-stage", "2", world_size=2)
    (gpu,), (cpu,) = (memory_of_stages(decided, device=device) for device in ("cuda", "cpu"))
    assert (gpu.buffers, cpu.buffers) == (2 * 4 * 50_000_000, 4 * decided.model.num_parameters)
    small = tiny_plan("--zero-stage", "2", "--zero-reduce-bucket-size", "100", world_size=2)
    assert memory_of_stages(small, device="cpu")[0].buffers == 2 * 4 * 100


def test_recomputation_takes_activations_and_adds_work():
    plain, selective, full = (
        tiny_plan("--attention-impl", "fused-softmax", *flags)
        for flags in ((), ("--recompute-activations",), ("--checkpoint-activations",))
    )
    kept = [memory_of_stages(decided)[0].activations for decided in (plain, selective, full)]
    assert kept[0] > kept[1] > kept[2]
    work = [step_flops(decided, recomputed=True) for decided in (plain, selective, full)]
    assert work[0] < work[1] < work[2]
    assert len({step_flops(decided, recomputed=False) for decided in (plain, selective, full)}) == 1


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


def test_the_summary_says_what_was_computed():
    decided = bloom()
    text = "\n".join([*run_lines(decided), *memory_lines(decided), *work_lines(decided)])
    assert "parameters: 176,247,271,424" in text
    assert "192 to 2048 in 117 sizes" in text
    assert "pipeline bubble: 7.9%" in text
    speed = replace(speed_of(decided, A100), gpu_hours=1000.0)
    known = Calibration(1.0, (1.0,), "a test")
    *_, run = device_lines(decided, A100, speed, calibration=known, price_per_gpu_hour=2.52)
    assert run.endswith("cost: 2,520")
    *_, times, run = device_lines(
        decided, A100, speed, calibration=ROOFLINE, price_per_gpu_hour=2.52
    )
    assert re.search(r"step: [0-9.]+ to [0-9.]+ s \| MFU: \d\d to \d\d% \(causal", times)
    assert re.fullmatch(
        r"run: \d+ to \d+ days \| GPU hours: 900 to 1,200 \| cost: 2,300 to 3,200", run
    )
    small = device_of("a100-40gb")
    *_, last = device_lines(decided, small, speed, calibration=known, price_per_gpu_hour=2.5)
    assert last.startswith("does not run on a100-40gb: needs more than")


@pytest.fixture(scope="module")
def found():
    """Layouts of BLOOM on its GPUs, at its last batch size."""
    config, _ = parse_config(BLOOM_176B.split())
    config = replace(config, training=replace(config.training, rampup_batch_size=None))
    return search(config, num_gpus=384, vocab_size=250680, device=A100)


def test_the_search_ranks_what_fits_and_groups_what_does_not(found):
    assert len(found.fitting) > 10
    times = [fitting.speed.step_s for fitting in found.fitting]
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
