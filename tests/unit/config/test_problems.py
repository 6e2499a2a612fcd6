"""All problems of a run's options, in one message each."""

import pytest
from problems import problem, require_problem
from tiny import tiny_argv, tiny_config, tiny_plan

from megatron.common.errors import ConfigError
from megatron.config.config import SECTIONS, parse_config
from megatron.config.parsing.declaration import flags_of
from megatron.config.plan.plan import plan
from megatron.config.plan.validation import validate

ROPE = "--position-embedding-type rope"
STRETCHED = f"{ROPE} --use-rope-scaling"
SAMPLES = "--train-samples 100"
RAMP = f"{SAMPLES} --global-batch-size 8 --rampup-batch-size"
STEPS = f"{SAMPLES} --step-batch-size-schedule"
WSD = "--lr-decay-style WSD"


def problems(line, *, world_size=1, device="cpu"):
    without = ("--train-iters",) if "--train-samples" in line else ()
    with pytest.raises(ConfigError) as caught:
        tiny_plan(*line.split(), world_size=world_size, device=device, without=without)
    return caught.value.problems


RANGED = {
    flag.options[0]: flag.setting
    for section in SECTIONS.values()
    for flag in flags_of(section)
    if flag.setting.range and flag.setting.matters
}


@pytest.mark.parametrize("flag", RANGED)
def test_a_value_out_of_its_range_is_refused(flag):
    setting = RANGED[flag]
    ends = {setting.at_least: -1, setting.above: 0, setting.at_most: 1, setting.below: 0}
    for end, step in ends.items():
        if end is not None:
            found = problems(f"{flag} {end + step} --save s")
            assert [each for each in found if each.startswith(flag) and setting.range in each]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--micro-batch-size 0", "--micro-batch-size 0 … at least 1"),
        ("--hidden-size 9", "--hidden-size 9 … --num-attention-heads 2 … --kv-channels"),
        ("--max-position-embeddings 5", "--max-position-embeddings 5 … --seq-length 6"),
        ("--norm-epsilon 0", "--layernorm-epsilon 0.0 … more than 0"),
        ("--num-query-groups 2", "--num-query-groups 2 … --group-query-attention"),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-attention-heads 2 … --num-query-groups 3",
        ),
        ("--window-size 4,4", "--window-size 4,4 … LEFT,0"),
        ("--window-size -2", "--window-size -2 … -1 for no window"),
        ("--window-size wide", "--window-size wide … LEFT,0"),
        ("--window-size 3,", "--window-size 3, … LEFT,0"),
        (
            "--use-rotary-position-embeddings --position-embedding-type alibi",
            "--use-rotary-position-embeddings … --position-embedding-type alibi … one of them",
        ),
        (
            "--no-position-embedding --position-embedding-type absolute",
            "--no-position-embedding … --position-embedding-type absolute … one of them",
        ),
        ("--rotary-percent 0.5", "--rotary-percent … --position-embedding-type rotary"),
        (
            "--rotary-seq-len-interpolation-factor 2",
            "--rotary-seq-len-interpolation-factor … --position-embedding-type rotary",
        ),
        ("--use-rope-scaling", "--use-rope-scaling … --position-embedding-type rotary"),
        (f"{ROPE} --rotary-percent 0", "--rotary-percent 0.0 … more than 0 … at most 1"),
        (f"{ROPE} --rotary-percent 0.75", "--rotary-percent 0.75 … are 3 … even number"),
        (f"{ROPE} --rotary-base 0", "--rotary-base 0.0 … more than 0"),
        (
            f"{ROPE} --rotary-seq-len-interpolation-factor -1",
            "--rotary-seq-len-interpolation-factor -1.0 … more than 0",
        ),
        (f"{STRETCHED} --rope-scaling-factor 0", "--rope-scaling-factor 0.0 … more than 0"),
        ("--swiglu --glu-activation reglu", "--swiglu … --glu-activation reglu … one of them"),
        ("--swiglu --squared-relu", "--swiglu … --squared-relu … one of them"),
        ("--quick-geglu --relu", "--quick-geglu … --relu … one of them"),
        ("--glu-linear-offset 1", "--glu-linear-offset 1.0 needs a gated MLP … --quick-geglu"),
        (
            "--activation-func-clamp-value 7 --relu",
            "--activation-func-clamp-value 7.0 needs a gated MLP … --swiglu",
        ),
        ("--squared-relu --relu", "--squared-relu … --relu … one of them"),
        (f"{ROPE} --rope-low-freq-factor 2", "--rope-low-freq-factor 2.0 … --use-rope-scaling"),
        (
            f"{STRETCHED} --rope-low-freq-factor 5",
            "--rope-low-freq-factor 5.0 … less than --rope-high-freq-factor 4.0",
        ),
        (
            f"{STRETCHED} --rope-scaling-type yarn",
            "--rope-scaling-type yarn … --rope-original-max-position-embeddings",
        ),
        (
            f"{STRETCHED} --rope-scaling-type dynamic --max-position-embeddings 12 "
            "--rope-original-max-position-embeddings 6",
            "--rope-scaling-type dynamic … --max-position-embeddings 12 must be … embeddings 6",
        ),
        (
            f"{STRETCHED} --rope-attention-factor 2",
            "--rope-attention-factor 2.0 … --rope-scaling-type yarn",
        ),
        (
            f"{ROPE} --rope-scaling-type yarn",
            "--rope-scaling-type yarn … --use-rope-scaling",
        ),
        (
            "--window-size 3,0 --window-attn-skip-freq [1]*3",
            "--window-attn-skip-freq [1]*3 … list of 2",
        ),
        (f"{ROPE} --rotary-local-base 100", "--rotary-local-base 100.0 … --window-size"),
        (
            "--rotary-local-base 100 --window-size 3",
            "--rotary-local-base … --position-embedding-type rotary",
        ),
        (
            f"{ROPE} --rotary-local-base 0 --window-size 3",
            "--rotary-local-base 0.0 … more than 0",
        ),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2 … --window-size"),
        (
            "--disable-bias-linear --add-qkv-bias --attention-bias on",
            "--attention-bias on … leave --add-qkv-bias out",
        ),
        ("--openai-gelu --gelu erf", "--gelu (erf) … --openai-gelu (tanh) … one of them"),
        (
            "--onnx-safe True --glu-activation geglu",
            "--onnx-safe … --glu-activation geglu … leave it out",
        ),
        (
            "--use-parallel-residual --apply-residual-connection-post-layernorm",
            "--parallel-residual … --apply-residual-connection-post-layernorm … one of them",
        ),
        ("--add-qkv-bias", "--add-qkv-bias … --disable-bias-linear … leave --add-qkv-bias out"),
        ("--tensor-model-parallel-size 0", "must be at least 1"),
        ("--pipeline-model-parallel-size 0", "must be at least 1"),
        ("--zero-stage 4", "--zero-stage 4 … 0, 1, 2, 3"),
        ("--pp-partition-method type:(", "--pp-partition-method type:( … position 0"),
        ("--pp-partition-method layers", "--pp-partition-method layers … type:REGEX"),
        ("--fp16 --bf16", "--fp16 … --bf16 … one of them"),
        ("--fp16", "--fp16 needs a GPU … --bf16 … fp32"),
        ("--distributed-backend nccl", "--distributed-backend nccl needs GPUs … gloo"),
        ("--global-batch-size 5", "--global-batch-size 5 … --micro-batch-size 2 * 1 replicas = 2"),
        (f"{SAMPLES} --rampup-batch-size 2 2", "--rampup-batch-size 2 2: three numbers"),
        (f"{RAMP} 2 0 9", "--rampup-batch-size 2 0 9 … at least 1"),
        (f"{RAMP} 2 4 9", "--rampup-batch-size 2 4 9 … --global-batch-size 8 … 4"),
        (f"{RAMP} 10 2 9", "--rampup-batch-size 10 2 9 … --global-batch-size 8 … 2"),
        (f"{RAMP} 2 3 9", "--rampup-batch-size 2 3 9 … 5 … micro-batch size * replicas = 2"),
        (
            "--rampup-batch-size 2 2 8 --global-batch-size 8",
            "--rampup-batch-size … --train-samples or --train-tokens instead of --train-iters",
        ),
        ("--lr-decay-samples 9", "--lr-decay-samples … --train-iters … same unit"),
        ("--lr-warmup-samples 9", "--lr-warmup-samples … --train-iters … same unit"),
        (f"{SAMPLES} --lr-decay-iters 9", "--lr-decay-iters … --train-samples … same unit"),
        (f"{SAMPLES} --lr-warmup-iters 9", "--lr-warmup-iters … --train-samples … same unit"),
        ("--lr -1", "--lr -1.0 … negative"),
        ("--min-lr -1", "--min-lr -1.0 … negative"),
        ("--min-lr 0.2", "--min-lr 0.2 … more than --lr 0.1"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5 … from 0 to 1"),
        (
            "--gradient-accumulation-steps 3 --global-batch-size 4",
            "--global-batch-size 4 … --gradient-accumulation-steps 3 = 6: leave one of the two out",
        ),
        ("--gas 0", "--gradient-accumulation-steps 0 … at least 1"),
        ("--step-batch-size-schedule 0:2", "--train-samples or --train-tokens instead of"),
        (f"{STEPS} 0:2 40B", "--step-batch-size-schedule 40B … such as 0:768 250B:1536"),
        (f"{STEPS} 0:0", "--step-batch-size-schedule 0:0 … such as 0:768 250B:1536"),
        (f"{STEPS} 0:0.5 200:8", "--step-batch-size-schedule 0:0.5 … such as 0:768 250B:1536"),
        (f"{STEPS} 0:2 12:2.9", "--step-batch-size-schedule 12:2.9 … such as 0:768 250B:1536"),
        (f"{STEPS} 6:2 12:4", "6:2 12:4 … begin at 0 tokens, as 0:2"),
        (f"{STEPS} 0:2 3:4", "0:2 3:4 … a sample of 6 tokens at least"),
        (f"{STEPS} 0:2 12:3", "0:2 12:3 … 3 … micro-batch size * replicas = 2"),
        (f"{STEPS} 0:2 12:4 --global-batch-size 4", "leave --global-batch-size out"),
        (f"{STEPS} 0:2 12:4 --rampup-batch-size 2 2 8", "leave --rampup-batch-size out"),
        (
            "--eval-micro-batch-size 4 --global-batch-size 6",
            "--eval-micro-batch-size: 6 samples … 4 samples * 1 replicas = 4",
        ),
        (
            "--eval-micro-batch-size 4 --eval-global-batch-size 6",
            "--eval-micro-batch-size and --eval-global-batch-size: 6 samples",
        ),
        ("--eval-micro-batch-size 0", "--eval-micro-batch-size 0 … at least 1"),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
            "--lr-warmup-fraction … --lr-warmup-iters … one of them",
        ),
        (
            "--lr-warmup-iters 1 --lr-warmup-tokens 2",
            "--lr-warmup-iters … --lr-warmup-tokens … one of them",
        ),
        ("--lr-warmup-init 0.2", "--lr-warmup-init 0.2 … between 0 and --lr 0.1"),
        (WSD, "--lr-decay-style WSD … --lr-wsd-decay-iters … --lr-wsd-decay-samples"),
        ("--lr-wsd-decay-iters 3", "--lr-wsd-decay-iters … --lr-decay-style WSD"),
        (f"{WSD} --lr-wsd-decay-samples 3", "--lr-wsd-decay-samples … --train-iters … same unit"),
        (
            f"{WSD} --lr-wsd-decay-iters 9 --lr-warmup-iters 2",
            "decay-iters 9 (18 samples) … --train-iters 10 (20 samples) … --lr-warmup-iters 2 (4",
        ),
        (
            f"{WSD} --lr-wsd-decay-iters 9 --lr-decay-iters 8",
            "--lr-wsd-decay-iters 9 (18 samples) … --lr-decay-iters 8 (16 samples)",
        ),
        (
            "--override-lr-scheduler --use-checkpoint-lr-scheduler",
            "--override-opt_param-scheduler … --use-checkpoint-opt_param-scheduler … exclude",
        ),
        ("--start-weight-decay 0.1", "need --weight-decay-incr-style linear or cosine"),
        (
            "--weight-decay-incr-style linear --end-weight-decay 1",
            "--weight-decay-incr-style linear … --start-weight-decay … --end-weight-decay",
        ),
        ("--use-bnb-optimizer --optimizer lion", "leave out --optimizer lion"),
        ("--use-bnb-optimizer", "8-bit … needs a GPU"),
        ("--optimizer-impl apex", "--optimizer-impl apex needs a GPU"),
        ("--optimizer-impl apex --optimizer sgd", "--optimizer-impl apex has no sgd"),
        ("--optimizer-impl deepspeed --optimizer muon", "deepspeed has no muon"),
        ("--optimizer adam8bit --optimizer-impl torch", "has no Adam with 8-bit state"),
        ("--cpu_torch_adam", "--cpu_torch_adam … --cpu-optimizer"),
        (
            "--cpu-optimizer --cpu_torch_adam --optimizer-impl deepspeed",
            "--cpu_torch_adam … --optimizer-impl deepspeed … exclude",
        ),
        ("--cpu-optimizer --zero-stage 0", "from stage 1 on … --zero-stage 1"),
        ("--remote-device cpu --zero-stage 2", "weights … ZeRO stage 3"),
        ("--remote-device nvme --zero-stage 3", "zero_optimization.offload_param.nvme"),
        ("--use-pin-memory", "--use-pin-memory … offloaded"),
        ("--use-distributed-optimizer --zero-stage 0", "--use-distributed-optimizer … stage 1"),
        ("--optimizer muon --zero-stage 3", "write --zero-stage 2"),
        ("--optimizer muon --cpu-optimizer", "take the offload out"),
        ("--loss-scale -1", "--loss-scale -1 … at least 0"),
        ("--initial-loss-scale 3", "--initial-loss-scale 3 … power of two"),
        ("--initial-loss-scale 0.5", "--initial-loss-scale 0.5 … power of two"),
        ("--min-loss-scale 0.5", "--min-loss-scale 0.5 … integer of at least 1"),
        ("--loss-scale-window 0", "--loss-scale-window 0 … integer of at least 1"),
        ("--hysteresis 0", "--hysteresis 0 … integer of at least 1"),
        ("--lr-decay-iters 0", "decays over 0 samples … at least 1"),
        (
            "--lr-warmup-iters 5 --lr-decay-iters 4",
            "--lr-warmup-iters 5 (10 samples) is not shorter than --lr-decay-iters 4 (8 samples)",
        ),
        (
            "--lr-warmup-fraction 1 --lr-decay-tokens 24",
            "--lr-warmup-fraction 1.0 (24 tokens) … --lr-decay-tokens 24",
        ),
        (
            f"{SAMPLES} --lr-warmup-samples 100 --lr-decay-samples 100",
            "--lr-warmup-samples 100 … --lr-decay-samples 100",
        ),
        ("--save s --save-interval 0", "--save-interval 0 … at least 1"),
        ("--pad-vocab-size-to 8", "--pad-vocab-size-to 8 … 11 tokens"),
        ("--pad-vocab-size-to 14", "--pad-vocab-size-to: 14 … 4 (--make-vocab-size-divisible-by)"),
        ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0 … at least 1"),
        ("--true-vocab-size 10", "--true-vocab-size 10 … 11 tokens"),
        (
            "--true-vocab-size 13 --pad-vocab-size-to 12",
            "--pad-vocab-size-to 12 … --true-vocab-size 13",
        ),
    ],
)
def test_a_problem_names_flag_value_and_remedy(line, words):
    require_problem(words, problems(line))


@pytest.mark.parametrize("flags", [[], ["--train-iters", "9", "--train-samples", "9"]])
def test_the_length_is_given_once(flags):
    config, _ = parse_config([*tiny_argv(without=("--train-iters",)), *flags])
    with problem("one of --train-iters, --train-samples"):
        validate(config, world_size=1, device="cpu")


def test_a_batch_size_of_the_json_is_named_by_its_key(tmp_path):
    file = tmp_path / "ds.json"
    for size, flags, words in (
        (4, "--gas 3", "= 6: leave one"),
        (5, "", "multiple"),
        (-1, "", "1"),
    ):
        file.write_text(f'{{"train_batch_size": {size}}}')
        output = problems(f"{flags} --deepspeed_config {file}")
        require_problem(f"--deepspeed_config … ds.json: train_batch_size {size} … {words}", output)
        assert "--global-batch-size" not in "".join(output)


def test_a_warm_up_longer_than_the_run_is_one_problem():
    assert len(problems("--lr-warmup-fraction 10")) == 1


def test_data_are_needed():
    with problem("--data-path … .bin/.idx pair"):
        validate(tiny_config(without=("--data-path",)), world_size=1, device="cpu")


def test_all_problems_are_told_at_once(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("{")
    line = (
        "--hidden-size 9 --max-position-embeddings 5 --fp16 --bf16 --global-batch-size 5 --seed 0 "
        f"--keep-last 2 --clip-grad -1 --zero-stage 7 --deepspeed_config {file}"
    )
    output = problems(line)
    named = (
        "--hidden-size 9, --max-position-embeddings 5, --fp16 and --bf16, --global-batch-size 5, "
    )
    named += (
        "--seed 0, --keep-last needs --save, --clip-grad -1.0, --zero-stage 7, ds.json is not JSON"
    )
    for words in named.split(", "):
        require_problem(words, output)
    assert len(output) == 9


def test_the_error_is_one_line_per_problem():
    with pytest.raises(ConfigError) as caught:
        tiny_plan("--seed", "0", "--log-interval", "0")
    assert str(caught.value).splitlines() == list(caught.value.problems)
    assert caught.value.exit_code == 2


def test_what_fits_is_not_refused():
    gpus = tiny_config("--fp16", "--distributed-backend", "nccl", "--zero-stage", "3")
    validate(gpus, world_size=4, device="cuda")
    validate(tiny_config("--bf16", "--distributed-backend", "gloo"), world_size=1, device="cpu")


def test_a_command_for_gpus_is_tried_on_cpus_that_are_named():
    gpus = ("--distributed-backend", "nccl", "--use-flash-attn", "--attention-backend", "flash")
    config, notices = parse_config(tiny_argv(*gpus, "--device", "cpu"))
    read = "".join(notices)
    assert "--distributed-backend nccl: read as gloo" in read
    assert "--use-flash-attn, --attention-impl flash: PyTorch computes" in read
    trial = plan(config, world_size=1, vocab_size=8, device="cpu")
    assert trial.kernels.attention != "flash"
    with problem("--use-flash-attn needs a GPU"):
        tiny_plan("--use-flash-attn")
