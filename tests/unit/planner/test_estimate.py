"""What a run is expected to need: against published runs, DeepSpeed's partition and plain counts."""

import json
import os
import re

from problems import problem

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from dataclasses import replace

import pytest
from deepspeed.runtime.utils import partition_balanced
from hypothesis import given
from hypothesis import strategies as st
from planned_runs import (
    A100,
    BLOOM_176B,
    COMMON,
    GPT3_175B,
    MT_NLG_530B,
    SIZES,
    bloom,
    on_one_gpu,
    planned,
)
from tiny import tiny_plan

from megatron.common.errors import DataError
from megatron.config.architecture import partition
from megatron.config.config import parse_config
from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.config.plan.plan import plan
from megatron.planner.calibration import ROOFLINE, Calibration, read_calibration
from megatron.planner.devices import GIB, device_of
from megatron.planner.memory import (
    checkpoint_bytes,
    memory_of_stages,
    micro_batches_under_way,
    weights_of,
)
from megatron.planner.search import faster_partition, obstacle, search
from megatron.planner.speed import bubble_of, idle_of_stages, speed_of, step_flops
from megatron.planner.stages import stages_of
from megatron.planner.summary import device_lines, memory_lines, run_lines, work_lines


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


def test_stages_are_those_of_a_network_whose_flags_are_lists():
    decided = bloom()
    listed = replace(decided, model=replace(decided.model, own_flags=(("sizes", [1, 2]),)))
    assert stages_of(listed) == stages_of(decided)


def test_the_summary_says_what_was_computed():
    decided = bloom()
    text = "\n".join([*run_lines(decided), *memory_lines(decided), *work_lines(decided)])
    assert "parameters: 176,247,271,424" in text
    assert "192 to 2048 in 117 sizes" in text
    assert "pipeline bubble: 7.9% of a step of equal stages" in text
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
