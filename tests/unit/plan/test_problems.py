"""Every reason why a run cannot be as asked, in the user's words."""

import json

import pytest
from tiny import tiny_argv, tiny_config, tiny_plan

from megatron.config.config import parse_config
from megatron.errors import ConfigError
from megatron.plan.plan import check

SAMPLES = "--train-samples 100"


def problems(line, *, world_size=1, device="cpu"):
    without = ("--train-iters",) if "--train-samples" in line else ()
    with pytest.raises(ConfigError) as caught:
        tiny_plan(*line.split(), world_size=world_size, device=device, without=without)
    return caught.value.problems


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-layers 0", "--num-layers 0 must be at least 1"),
        ("--hidden-size -8", "--hidden-size -8 must be at least 1"),
        ("--num-attention-heads 0", "--num-attention-heads 0 must be at least 1"),
        ("--seq-length 0", "--seq-length 0 must be at least 1"),
        ("--ffn-hidden-size 0", "--ffn-hidden-size 0 must be at least 1"),
        ("--kv-channels 0", "--kv-channels 0 must be at least 1"),
        ("--kv-channels -1", "--kv-channels -1 must be at least 1"),
        ("--attention-dropout 1", "--attention-dropout 1.0 must be at least 0 and less than 1"),
        ("--hidden-dropout -0.1", "--hidden-dropout -0.1 must be at least 0 and less than 1"),
        (
            "--hidden-size 9",
            "--hidden-size 9 is not a multiple of --num-attention-heads 2; change one of them or "
            "give --kv-channels",
        ),
        (
            "--max-position-embeddings 5",
            "--max-position-embeddings 5 is less than --seq-length 6; every position needs a row",
        ),
        ("--tensor-model-parallel-size 0", "must be at least 1"),
        ("--pipeline-model-parallel-size 0", "must be at least 1"),
        ("--zero-stage 4", "--zero-stage 4 is none of 0, 1, 2, 3"),
        (
            "--pp-partition-method type:(",
            "--pp-partition-method type:(: not a regular expression (missing ), unterminated "
            "subpattern at position 0)",
        ),
        (
            "--pp-partition-method layers",
            "--pp-partition-method layers is none of type:REGEX, uniform, parameters",
        ),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other: give one of them"),
        (
            "--fp16",
            "--fp16 needs a GPU and this run is on CPUs: write --bf16, or neither for fp32",
        ),
        (
            "--distributed-backend nccl",
            "--distributed-backend nccl needs GPUs and this run is on CPUs: write gloo, or leave "
            "the flag out",
        ),
        ("--micro-batch-size 0", "--micro-batch-size 0 must be at least 1"),
        ("--global-batch-size 0", "--global-batch-size 0 must be at least 1"),
        (
            "--global-batch-size 5",
            "--global-batch-size 5 is not a multiple of --micro-batch-size 2 * 1 replicas = 2",
        ),
        (
            f"{SAMPLES} --rampup-batch-size 2 2",
            "--rampup-batch-size 2 2: three numbers are needed: first batch size, increment, "
            "samples",
        ),
        (
            f"{SAMPLES} --global-batch-size 8 --rampup-batch-size 2 0 9",
            "--rampup-batch-size 2 0 9: all three numbers must be at least 1",
        ),
        (
            f"{SAMPLES} --global-batch-size 8 --rampup-batch-size 2 4 9",
            "--rampup-batch-size 2 4 9: 2 does not reach --global-batch-size 8 in steps of 4",
        ),
        (
            f"{SAMPLES} --global-batch-size 8 --rampup-batch-size 10 2 9",
            "--rampup-batch-size 10 2 9: 10 does not reach --global-batch-size 8 in steps of 2",
        ),
        (
            f"{SAMPLES} --global-batch-size 8 --rampup-batch-size 2 3 9",
            "--rampup-batch-size 2 3 9: batch size 5 on the way is not a multiple of micro-batch "
            "size * replicas = 2",
        ),
        (
            "--rampup-batch-size 2 2 8 --global-batch-size 8",
            "--rampup-batch-size is counted in samples: give --train-samples instead of "
            "--train-iters",
        ),
        ("--train-iters 0", "--train-iters 0 must be at least 1"),
        ("--train-samples 0", "--train-samples 0 must be at least 1"),
        ("--exit-interval 0", "--exit-interval 0 must be at least 1"),
        ("--seed 0", "--seed 0 must be at least 1"),
        (
            "--lr-decay-samples 9",
            "--lr-decay-samples does not go with --train-iters: count both in the same unit",
        ),
        (
            "--lr-warmup-samples 9",
            "--lr-warmup-samples does not go with --train-iters: count both in the same unit",
        ),
        (
            f"{SAMPLES} --lr-decay-iters 9",
            "--lr-decay-iters does not go with --train-samples: count both in the same unit",
        ),
        (
            f"{SAMPLES} --lr-warmup-iters 9",
            "--lr-warmup-iters does not go with --train-samples: count both in the same unit",
        ),
        ("--lr -1", "--lr -1.0 and --min-lr 0.0 must not be negative"),
        ("--min-lr -1", "--lr 0.1 and --min-lr -1.0 must not be negative"),
        ("--min-lr 0.2", "--min-lr 0.2 is more than --lr 0.1"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5 must be between 0 and 1"),
        ("--lr-warmup-iters -1", "--lr-warmup-iters -1 must be at least 0"),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
            "--lr-warmup-fraction and --lr-warmup-iters/samples say the same: give one of them",
        ),
        (
            "--lr-decay-iters 0",
            "the learning rate decays over 0 samples; at least 1 is needed",
        ),
        (
            "--lr-warmup-iters 10",
            "the warm-up (20 samples) is not shorter than the decay (20 samples)",
        ),
        ("--log-interval 0", "--log-interval 0 must be at least 1"),
        ("--tensorboard-log-interval 0", "--tensorboard-log-interval 0 must be at least 1"),
        ("--eval-interval 0", "--eval-interval 0 must be at least 1"),
        ("--eval-iters -1", "--eval-iters -1 must be at least 0"),
        ("--save s --save-interval 0", "--save-interval 0 must be at least 1"),
        ("--clip-grad -1", "--clip-grad -1.0 must be at least 0"),
        ("--weight-decay -1", "--weight-decay -1.0 must be at least 0"),
        ("--adam-beta1 1", "--adam-beta1 1.0 must be at least 0 and less than 1"),
        ("--adam-beta2 -1", "--adam-beta2 -1.0 must be at least 0 and less than 1"),
        ("--save s", "--save needs --save-interval: how many iterations apart"),
        ("--save-interval 5", "--save-interval needs --save: the directory"),
        (
            "--pad-vocab-size-to 8",
            "--pad-vocab-size-to 8 is less than the tokenizer's 11 tokens",
        ),
        (
            "--pad-vocab-size-to 14",
            "--pad-vocab-size-to: 14 is not divisible by 4 (--make-vocab-size-divisible-by)",
        ),
        (
            "--make-vocab-size-divisible-by 0",
            "--make-vocab-size-divisible-by 0 must be at least 1",
        ),
    ],
)
def test_a_problem_is_told(line, message):
    assert [problem for problem in problems(line) if message in problem]


@pytest.mark.parametrize(
    ("line", "world_size", "message"),
    [
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            6,
            "6 processes cannot hold whole replicas of 4 (--tensor-model-parallel-size 2 * "
            "--pipeline-model-parallel-size 2); start a multiple of that, or lower one of the two",
        ),
        (
            "--tensor-model-parallel-size 4",
            4,
            "--num-attention-heads 2 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (
            "--tensor-model-parallel-size 2 --ffn-hidden-size 9",
            2,
            "--ffn-hidden-size 9 is not a multiple of --tensor-model-parallel-size 2",
        ),
        (
            "--tensor-model-parallel-size 2 --pad-vocab-size-to 13 "
            "--make-vocab-size-divisible-by 1",
            2,
            "--pad-vocab-size-to 13 is not a multiple of --tensor-model-parallel-size 2",
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
            "--global-batch-size 6 is not a multiple of --micro-batch-size 2 * 2 replicas = 4",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_told(line, world_size, message):
    assert message in problems(line, world_size=world_size)


@pytest.mark.parametrize("flags", [[], ["--train-iters", "9", "--train-samples", "9"]])
def test_the_length_is_given_once(flags):
    config, _ = parse_config([*tiny_argv(without=("--train-iters",)), *flags])
    with pytest.raises(ConfigError, match="give exactly one of --train-iters and --train-samples"):
        check(config, world_size=1, device="cpu")


def test_data_are_needed():
    with pytest.raises(ConfigError, match="--data-path is missing: the prefix of a .bin/.idx pair"):
        check(tiny_config(without=("--data-path",)), world_size=1, device="cpu")


def test_all_problems_are_told_at_once(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("{")
    line = (
        "--hidden-size 9 --max-position-embeddings 5 --fp16 --bf16 --global-batch-size 5 --seed 0 "
        f"--save s --clip-grad -1 --zero-stage 7 --deepspeed_config {file}"
    )
    told = problems(line)
    for words in (
        "--hidden-size 9",
        "--max-position-embeddings 5",
        "--fp16 and --bf16",
        "--global-batch-size 5",
        "--seed 0",
        "--save needs",
        "--clip-grad -1.0",
        "--zero-stage 7",
        "ds.json is not JSON",
    ):
        assert [problem for problem in told if words in problem], words
    assert len(told) == 9


def test_the_error_is_one_line_per_problem():
    with pytest.raises(ConfigError) as caught:
        tiny_plan("--seed", "0", "--log-interval", "0")
    assert str(caught.value).splitlines() == list(caught.value.problems)
    assert caught.value.exit_code == 2


def test_what_fits_is_not_refused():
    gpus = tiny_config("--fp16", "--distributed-backend", "nccl", "--zero-stage", "3")
    check(gpus, world_size=4, device="cuda")
    check(tiny_config("--bf16", "--distributed-backend", "gloo"), world_size=1, device="cpu")


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
