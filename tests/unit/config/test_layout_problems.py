"""Problems of parallel layouts, ZeRO and the DeepSpeed JSON."""

import json

import pytest
from test_problems import problems
from tiny import tiny_plan

from megatron.common.errors import ConfigError

STAGES = "--num-layers 8 --pipeline-model-parallel-size 2 --global-batch-size 8"


def test_batches_are_not_blamed_for_processes_that_are_left_over():
    line = "--tensor-model-parallel-size 2 --global-batch-size 4 --train-samples 40"
    (output,) = problems(f"{line} --rampup-batch-size 2 2 8", world_size=7)
    assert "needs a multiple of 2 processes, got 7" in output


@pytest.mark.parametrize(
    ("line", "world_size", "message"),
    [
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            6,
            "--tensor-model-parallel-size 2 * --pipeline-model-parallel-size 2 = 4 needs a multiple of "
            "4 processes, got 6; start them with `deepspeed --num_gpus 4 …`, or lower one of them",
        ),
        (
            "--tensor-model-parallel-size 4",
            4,
            "--num-attention-heads 2 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (
            "--tensor-model-parallel-size 2 --group-query-attention",
            2,
            "--num-query-groups 1 is not a multiple of --tensor-model-parallel-size 2: every rank "
            "needs full groups of heads; take 2 groups, or fewer ranks",
        ),
        (
            "--tensor-model-parallel-size 2 --ffn-hidden-size 9",
            2,
            "--ffn-hidden-size 9 is not a multiple of --tensor-model-parallel-size 2",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            1,
            "--num-virtual-stages-per-pipeline-rank 2 divides the stages of a pipeline, and there is "
            "one stage: add --pipeline-model-parallel-size 2 or more, or leave it out",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            2,
            "--num-virtual-stages-per-pipeline-rank 2: 2 chunks of 2 stages are more than "
            "--num-layers 2: a chunk would have no layer",
        ),
        (
            f"{STAGES} --num-virtual-stages-per-pipeline-rank 0",
            2,
            "--num-virtual-stages-per-pipeline-rank 0 must be at least 1",
        ),
        (
            f"{STAGES} --num-layers-per-virtual-pipeline-stage 3",
            2,
            "--num-layers-per-virtual-pipeline-stage 3: --num-layers 8 is not a multiple of it times "
            "--pipeline-model-parallel-size 2 = 6",
        ),
        (
            f"{STAGES} --num-layers-per-virtual-pipeline-stage 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            2,
            "--num-layers-per-virtual-pipeline-stage 2 and --num-virtual-stages-per-pipeline-rank 2 "
            "set the same number in two ways: take one of them out",
        ),
        (
            f"{STAGES} --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8 "
            "--rampup-batch-size 4 2 100 --train-samples 400",
            2,
            "the interleaved pipeline schedule (2 chunks a stage) needs a number of micro-batches that "
            "is a multiple of --pipeline-model-parallel-size 2, and a global batch of 6 samples has 3: "
            "write multiples of 4 in --global-batch-size and --rampup-batch-size",
        ),
        (
            "--enable-zbh1-pipeline",
            1,
            "--enable-zbh1-pipeline is a schedule of pipeline stages, and there is one: add "
            "--pipeline-model-parallel-size 2 or more, or leave it out",
        ),
        (
            f"{STAGES} --enable-zbh1-pipeline --compile",
            2,
            "--enable-zbh1-pipeline does not go with --compile: weight gradients cannot be put off "
            "there; leave one of the two out",
        ),
        (
            "--pipeline-model-parallel-size 3",
            3,
            "--pipeline-model-parallel-size 3 is more than --num-layers 2: a stage would have no "
            "layer",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-stage 2",
            2,
            "--zero-stage 2 does not work with --pipeline-model-parallel-size 2: a pipeline "
            "accumulates gradients over its micro-batches, so they cannot be divided over ranks; "
            "write --zero-stage 1, or one pipeline stage",
        ),
        (
            "--global-batch-size 6",
            2,
            "--global-batch-size 6 is not a multiple of --micro-batch-size 2 * 2 replicas = 4; "
            "--elastic trains on fewer, which divide it",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_told(line, world_size, message):
    assert message in problems(line, world_size=world_size)


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
    assert message in "\n".join(problems(line, world_size=2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer muon --bf16", "--optimizer muon with ZeRO needs a pipeline of one stage"),
        ("--cpu-optimizer --bf16", "an offloaded optimizer does not work in bf16 with"),
    ],
)
def test_what_a_pipeline_cannot_do_is_told(flags, message):
    found = problems(f"--pipeline-model-parallel-size 2 {flags}", world_size=2)
    assert [problem for problem in found if message in problem]


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
    found = problems(f"--deepspeed_config {file}", world_size=2)
    assert [problem for problem in found if message in problem]


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
        with pytest.raises(ConfigError, match="where DeepSpeed would lose some of them"):
            tiny_plan(*words, world_size=2, device="cuda")
    else:
        tiny_plan(*words, world_size=2, device="cuda")
