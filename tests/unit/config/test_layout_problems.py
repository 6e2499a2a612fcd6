"""Problems of parallel layouts, ZeRO and the DeepSpeed JSON."""

import json

import pytest
from problems import problem, require_problem
from test_problems import problems
from tiny import tiny_plan

TENSOR, CHUNKS = "--tensor-model-parallel-size {}", "--num-virtual-stages-per-pipeline-rank {}"
LAYERS = "--num-layers-per-virtual-pipeline-stage {}"
STAGES = "--num-layers 8 --pipeline-model-parallel-size 2 --global-batch-size 8"


def test_batches_are_not_blamed_for_processes_that_are_left_over():
    line = "--tensor-model-parallel-size 2 --global-batch-size 4 --train-samples 40"
    (output,) = problems(f"{line} --rampup-batch-size 2 2 8", world_size=7)
    assert "needs a multiple of 2 processes, got 7" in output


@pytest.mark.parametrize(
    ("world_size", "line", "words"),
    [
        (
            6,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            "tensor-model-parallel-size 2 * --pipeline-model-parallel-size 2 = 4 … 4 … got 6",
        ),
        (4, TENSOR.format(4), f"--num-attention-heads 2 … {TENSOR.format(4)}"),
        (
            4,
            f"{TENSOR.format(4)} --num-attention-heads 12 --kv-channels 4 --group-query-attention "
            "--num-query-groups 3",
            f"--num-query-groups 3 … {TENSOR.format(4)} … nor a divisor … 4 groups",
        ),
        (
            2,
            f"{TENSOR.format(2)} --ffn-hidden-size 9",
            f"--ffn-hidden-size 9 … {TENSOR.format(2)}",
        ),
        (1, CHUNKS.format(2), f"{CHUNKS.format(2)} … --pipeline-model-parallel-size 2"),
        (
            2,
            f"--pipeline-model-parallel-size 2 {CHUNKS.format(2)}",
            f"{CHUNKS.format(2)} … --num-layers 2",
        ),
        (2, f"{STAGES} {CHUNKS.format(0)}", f"{CHUNKS.format(0)} … at least 1"),
        (
            2,
            f"{STAGES} {LAYERS.format(3)}",
            f"{LAYERS.format(3)} … --num-layers 8 … --pipeline-model-parallel-size 2 = 6",
        ),
        (
            2,
            f"{STAGES} {LAYERS.format(2)} {CHUNKS.format(2)}",
            f"{LAYERS.format(2)} and {CHUNKS.format(2)} … take one of them out",
        ),
        (
            2,
            f"{STAGES} {LAYERS.format(2)} --rampup-batch-size 4 2 100 --train-samples 400",
            "--pipeline-model-parallel-size 2 … 6 samples has 3 … multiples of 4 … --rampup-batch-size",
        ),
        (
            1,
            "--enable-zbh1-pipeline",
            "--enable-zbh1-pipeline … --pipeline-model-parallel-size 2 or more, or leave it out",
        ),
        (
            2,
            f"{STAGES} --enable-zbh1-pipeline --compile",
            "--enable-zbh1-pipeline … --compile … leave one of the two out",
        ),
        (
            3,
            "--pipeline-model-parallel-size 3",
            "--pipeline-model-parallel-size 3 … more than --num-layers 2",
        ),
        (
            2,
            "--pipeline-model-parallel-size 2 --zero-stage 2",
            "--zero-stage 2 … --pipeline-model-parallel-size 2 … write --zero-stage 1",
        ),
        (
            2,
            "--global-batch-size 6",
            "--global-batch-size 6 … --micro-batch-size 2 * 2 replicas = 4: write 8; --elastic",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_told(world_size, line, words):
    require_problem(words, problems(line, world_size=world_size))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fp16": True}, "fp16"),
        ({"bf16": "yes"}, "bf16"),
        ({"zero_optimization": 1}, "zero_optimization"),
        ({"zero_optimization": {"stage": "one"}}, "one"),
        ({"train_batch_size": "64"}, "64"),
        ({"gradient_clipping": None}, "gradient_clipping"),
    ],
    ids=str,
)
def test_json_of_another_type_is_a_mistake_of_the_user(tmp_path, content, message):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    line = f"--deepspeed_config {file} --pipeline-model-parallel-size 2"
    require_problem(message, problems(line, world_size=2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cpu-optimizer --bf16", "an offloaded optimizer does not work in bf16 with"),
    ],
)
def test_what_a_pipeline_cannot_do_is_told(flags, message):
    require_problem(message, problems(f"--pipeline-model-parallel-size 2 {flags}", world_size=2))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "offloaded by ZeRO from stage 1 on"),
        ({"offload_optimizer": {}}, "offloaded by ZeRO from stage 1 on"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "by ZeRO stage 3 alone, not by stage 2"),
        (
            {"stage": 2, "offload_optimizer": {"device": "nvme"}},
            "only ZeRO stage 3 offloads to nvme",
        ),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "nvme needs zero_optimization.off"),
        ({"stage": 3, "offload_optimizer": {"device": "tape"}}, "not one of none, cpu, nvme"),
        ({"stage": 2, "zero_quantized_weights": True}, "works at ZeRO stage 3 alone"),
        ({"stage": 3, "zero_hpz_partition_size": 4}, "4 does not divide the 2 replicas"),
        ({"stage": 3, "zero_hpz_partition_size": "2"}, "expected int"),
    ],
)
def test_what_zero_cannot_do_is_told(block, message, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": block}))
    require_problem(message, problems(f"--deepspeed_config {file}", world_size=2))


@pytest.mark.parametrize(
    "block",
    [
        {"stage": 1, "zero_hpz_partition_size": 1, "zero_quantized_weights": False},
        {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True},
        {"stage": 1, "offload_param": {"device": "none"}},
    ],
)
def test_what_zero_can_do_passes_through(block, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": block}))
    zero = tiny_plan("--deepspeed_config", str(file), world_size=2).deepspeed["zero_optimization"]
    assert zero == zero | block


@pytest.mark.parametrize(
    ("pipeline", "flags", "refused"),
    [
        (2, "--fp16 --accumulate-allreduce-grads-in-fp32", True),
        (1, "--fp16 --accumulate-allreduce-grads-in-fp32", False),
        (2, "--fp16", False),
        (2, "--bf16 --accumulate-allreduce-grads-in-fp32", False),
        (2, "--fp16 --cpu-optimizer", False),
        (2, "--cpu-optimizer", False),
    ],
)
def test_gradients_that_a_pipeline_would_lose_are_told(pipeline, flags, refused):
    words = f"--pipeline-model-parallel-size {pipeline} {flags}".split()
    if refused:
        with problem("DeepSpeed would lose"):
            tiny_plan(*words, world_size=2, device="cuda")
    else:
        tiny_plan(*words, world_size=2, device="cuda")
