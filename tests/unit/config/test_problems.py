"""All problems of a run's options, in one message each."""

import pytest
from tiny import tiny_argv, tiny_config, tiny_plan

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.plan.validation import validate

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
        ("--reshape-buffer-mb 0", "--reshape-buffer-mb 0 must be at least 1"),
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
        ("--num-query-groups 0", "--num-query-groups 0 must be at least 1"),
        ("--norm-epsilon 0", "--layernorm-epsilon 0.0 must be more than 0"),
        ("--init-method-std -1", "--init-method-std -1.0 must be more than 0"),
        ("--num-query-groups 2", "--num-query-groups 2 needs --group-query-attention"),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-attention-heads 2 is not a multiple of --num-query-groups 3: every group has "
            "as many heads as the others",
        ),
        *(
            (
                f"--window-size {size}",
                f"--window-size {size} is not LEFT or LEFT,0 with LEFT at least 0, or -1 for no "
                "window: a token sees no later tokens",
            )
            for size in ("4,4", "-2", "wide", "3,")
        ),
        (
            "--use-rotary-position-embeddings --position-embedding-type alibi",
            "--use-rotary-position-embeddings and --position-embedding-type alibi contradict each "
            "other: give one of them",
        ),
        (
            "--no-position-embedding --position-embedding-type absolute",
            "--no-position-embedding and --position-embedding-type absolute contradict each "
            "other: give one of them",
        ),
        *(
            (flags, f"{flags.split()[0]} needs --position-embedding-type rotary")
            for flags in (
                "--rotary-percent 0.5",
                "--rotary-seq-len-interpolation-factor 2",
                "--use-rope-scaling",
            )
        ),
        (
            "--position-embedding-type rotary --rotary-percent 0",
            "--rotary-percent 0.0 must be more than 0 and at most 1",
        ),
        (
            "--position-embedding-type rotary --rotary-percent 0.75",
            "--rotary-percent 0.75 of 4 features per head are 3: rotary positions turn pairs, so "
            "an even number above 0 is needed",
        ),
        (
            "--position-embedding-type rope --rotary-base 0",
            "--rotary-base 0.0 must be more than 0",
        ),
        (
            "--position-embedding-type rope --rotary-seq-len-interpolation-factor -1",
            "--rotary-seq-len-interpolation-factor -1.0 must be more than 0",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 0",
            "--rope-scaling-factor 0.0 must be more than 0",
        ),
        (
            "--swiglu --glu-activation reglu",
            "--swiglu and --glu-activation reglu exclude each other: give one of them",
        ),
        (
            "--swiglu --squared-relu",
            "--swiglu and --squared-relu exclude each other: give one of them",
        ),
        (
            "--squared-relu --relu",
            "--squared-relu and --relu exclude each other: give one of them",
        ),
        (
            "--position-embedding-type rope --rope-low-freq-factor 2",
            "--rope-low-freq-factor 2.0 needs --use-rope-scaling",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-low-freq-factor 5",
            "--rope-low-freq-factor 5.0 must be less than --rope-high-freq-factor 4.0: "
            "wavelengths between the two are stretched in part",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-type yarn",
            "--rope-scaling-type yarn needs --rope-original-max-position-embeddings: the tokens "
            "that the network was trained on before",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-type dynamic "
            "--max-position-embeddings 12 --rope-original-max-position-embeddings 6",
            "--rope-scaling-type dynamic: --max-position-embeddings 12 must be the "
            "--rope-original-max-position-embeddings 6, because the angles of longer texts "
            "would depend on how long each is",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-attention-factor 2",
            "--rope-attention-factor 2.0 needs --rope-scaling-type yarn",
        ),
        (
            "--position-embedding-type rope --rope-scaling-type yarn",
            "--rope-scaling-type yarn needs --use-rope-scaling",
        ),
        (
            "--window-size 3,0 --window-attn-skip-freq [1]*3",
            "--window-attn-skip-freq [1]*3 is neither a number of at least 1 nor a list of 2 times 1 "
            "(a layer with the window) or 0, such as [1]*3+[0]",
        ),
        ("--attn-logit-softcapping 0", "--attn-logit-softcapping 0.0 must be more than 0"),
        ("--final-logit-softcapping -1", "--final-logit-softcapping -1.0 must be more than 0"),
        ("--query-pre-attn-scalar 0", "--query-pre-attn-scalar 0.0 must be more than 0"),
        (
            "--position-embedding-type rope --rotary-local-base 100",
            "--rotary-local-base 100.0 needs --window-size",
        ),
        (
            "--rotary-local-base 100 --window-size 3",
            "--rotary-local-base needs --position-embedding-type rotary",
        ),
        (
            "--position-embedding-type rope --rotary-local-base 0 --window-size 3",
            "--rotary-local-base 0.0 must be more than 0",
        ),
        (
            "--window-attn-skip-freq 2",
            "--window-attn-skip-freq 2 needs --window-size",
        ),
        (
            "--disable-bias-linear --add-qkv-bias --attention-bias on",
            "--attention-bias on is of queries, keys and values too: leave --add-qkv-bias out",
        ),
        (
            "--openai-gelu --gelu erf",
            "--gelu (erf) and --openai-gelu (tanh) name two forms of GELU: give one of them",
        ),
        (
            "--onnx-safe True --glu-activation geglu",
            "--onnx-safe chooses a form of the plain MLP's GELU, which --glu-activation geglu "
            "replaces: leave it out",
        ),
        (
            "--use-parallel-residual --apply-residual-connection-post-layernorm",
            "--parallel-residual adds attention and MLP to one residual, and "
            "--apply-residual-connection-post-layernorm takes one after each of two norms: "
            "give one of them",
        ),
        (
            "--add-qkv-bias",
            "--add-qkv-bias keeps a bias that --disable-bias-linear takes out; without that flag "
            "it is there: leave --add-qkv-bias out",
        ),
        ("--tensor-model-parallel-size 0", "must be at least 1"),
        ("--pipeline-model-parallel-size 0", "must be at least 1"),
        ("--zero-stage 4", "--zero-stage 4 is not one of 0, 1, 2, 3"),
        (
            "--pp-partition-method type:(",
            "--pp-partition-method type:(: not a regular expression (missing ), unterminated "
            "subpattern at position 0)",
        ),
        (
            "--pp-partition-method layers",
            "--pp-partition-method layers is not one of type:REGEX, uniform, parameters",
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
        (
            "--gradient-accumulation-steps 3 --global-batch-size 4",
            "--global-batch-size 4 is not --micro-batch-size 2 * 1 replicas * "
            "--gradient-accumulation-steps 3 = 6: leave one of the two out",
        ),
        ("--gas 0", "--gradient-accumulation-steps 0 must be at least 1"),
        (
            "--step-batch-size-schedule 0:2",
            "--step-batch-size-schedule is counted in tokens: give --train-samples instead of "
            "--train-iters",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 0:2 40B",
            "--step-batch-size-schedule 40B: write TOKENS:SIZE, the tokens after which a step takes "
            "SIZE samples, such as 0:768 250B:1536",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 0:0",
            "--step-batch-size-schedule 0:0: write TOKENS:SIZE, the tokens after which a step takes "
            "SIZE samples, such as 0:768 250B:1536",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 6:2 12:4",
            "--step-batch-size-schedule 6:2 12:4: the first entry must begin at 0 tokens, as 0:2",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 0:2 3:4",
            "--step-batch-size-schedule 0:2 3:4: sizes 2 and 4 begin at the same sample: thresholds "
            "must differ by a sample of 6 tokens at least",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 0:2 12:3",
            "--step-batch-size-schedule 0:2 12:3: batch size 3 is not a multiple of micro-batch "
            "size * replicas = 2",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 0:2 12:4 --global-batch-size 4",
            "--step-batch-size-schedule sets the size of every global batch: leave "
            "--global-batch-size out",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 0:2 12:4 --rampup-batch-size 2 2 8",
            "--step-batch-size-schedule sets the size of every global batch: leave "
            "--rampup-batch-size out",
        ),
        (
            "--eval-micro-batch-size 4 --global-batch-size 6",
            "--eval-micro-batch-size: 6 samples of an evaluated batch are not a multiple of 4 samples "
            "* 1 replicas = 4",
        ),
        (
            "--eval-micro-batch-size 4 --eval-global-batch-size 6",
            "--eval-micro-batch-size and --eval-global-batch-size: 6 samples of an evaluated batch are "
            "not a multiple of 4 samples * 1 replicas = 4",
        ),
        ("--eval-micro-batch-size 0", "--eval-micro-batch-size 0 must be at least 1"),
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
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5 must be from 0 to 1"),
        ("--lr-warmup-iters -1", "--lr-warmup-iters -1 must be at least 0"),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
            "--lr-warmup-fraction and --lr-warmup-iters/samples/tokens set the same: give one of "
            "them",
        ),
        (
            "--lr-warmup-iters 1 --lr-warmup-tokens 2",
            "--lr-warmup-iters and --lr-warmup-tokens set the same: give one of them",
        ),
        ("--lr-warmup-tokens -1", "--lr-warmup-tokens -1 must be at least 0"),
        ("--lr-warmup-init 0.2", "--lr-warmup-init 0.2 must be between 0 and --lr 0.1"),
        (
            "--lr-decay-style WSD",
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples: how long "
            "its last part is",
        ),
        (
            "--lr-wsd-decay-iters 3",
            "--lr-wsd-decay-iters and --lr-wsd-decay-samples need --lr-decay-style WSD",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-samples 3",
            "--lr-wsd-decay-samples does not go with --train-iters: count both in the same unit",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2",
            "--lr-wsd-decay-iters 9 (18 samples) does not fit into --train-iters 10 (20 samples) "
            "after --lr-warmup-iters 2 (4 samples)",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-decay-iters 8",
            "--lr-wsd-decay-iters 9 (18 samples) does not fit into --lr-decay-iters 8 (16 samples)",
        ),
        (
            "--override-lr-scheduler --use-checkpoint-lr-scheduler",
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
            "other: the learning rate is that of the flags, or that of the checkpoint",
        ),
        ("--start-weight-decay 0.1", "need --weight-decay-incr-style linear or cosine"),
        (
            "--weight-decay-incr-style linear --end-weight-decay 1",
            "--weight-decay-incr-style linear needs both --start-weight-decay and "
            "--end-weight-decay",
        ),
        ("--lion-beta2 1", "--lion-beta2 1.0 must be at least 0 and less than 1"),
        ("--muon-momentum 1", "--muon-momentum 1.0 must be at least 0 and less than 1"),
        ("--muon-num-ns-steps 0", "--muon-num-ns-steps 0 must be at least 1"),
        ("--muon-extra-scale-factor 0", "--muon-extra-scale-factor 0.0 must be more than 0"),
        ("--use-bnb-optimizer --optimizer lion", "leave out --optimizer lion"),
        ("--use-bnb-optimizer", "Adam with 8-bit state needs a GPU to step on"),
        ("--optimizer-impl apex", "--optimizer-impl apex needs a GPU to step on"),
        ("--optimizer-impl apex --optimizer sgd", "--optimizer-impl apex has no sgd here"),
        ("--optimizer-impl deepspeed --optimizer muon", "deepspeed has no muon here"),
        ("--optimizer adam8bit --optimizer-impl torch", "has no Adam with 8-bit state"),
        ("--cpu_torch_adam", "--cpu_torch_adam chooses the Adam of --cpu-optimizer"),
        (
            "--cpu-optimizer --cpu_torch_adam --optimizer-impl deepspeed",
            "--cpu_torch_adam and --optimizer-impl deepspeed exclude each other",
        ),
        (
            "--cpu-optimizer --zero-stage 0",
            "the optimizer's state is offloaded by ZeRO from stage 1 on: write --zero-stage 1",
        ),
        ("--remote-device cpu --zero-stage 2", "weights are offloaded by ZeRO stage 3 alone"),
        ("--remote-device nvme --zero-stage 3", "nvme needs zero_optimization.offload_param.nvme"),
        ("--use-pin-memory", "--use-pin-memory is for what is offloaded"),
        ("--zero-reduce-bucket-size -1", "--zero-reduce-bucket-size -1 must be at least 0"),
        (
            "--use-distributed-optimizer --zero-stage 0",
            "--use-distributed-optimizer is ZeRO stage 1",
        ),
        ("--optimizer muon --zero-stage 3", "write --zero-stage 2"),
        ("--optimizer muon --cpu-optimizer", "take the offload out"),
        ("--loss-scale -1", "--loss-scale -1 must be at least 0"),
        ("--initial-loss-scale 3", "--initial-loss-scale 3 must be a power of two"),
        ("--initial-loss-scale 0.5", "--initial-loss-scale 0.5 must be a power of two"),
        ("--min-loss-scale 0.5", "--min-loss-scale 0.5 must be an integer of at least 1"),
        ("--loss-scale-window 0", "--loss-scale-window 0 must be an integer of at least 1"),
        ("--hysteresis 0", "--hysteresis 0 must be an integer of at least 1"),
        (
            "--lr-decay-iters 0",
            "the learning rate decays over 0 samples; at least 1 is needed",
        ),
        (
            "--lr-warmup-iters 10",
            "--lr-warmup-iters 10 (20 samples) is not shorter than --train-iters 10 (20 samples)",
        ),
        (
            "--lr-warmup-iters 5 --lr-decay-iters 4",
            "--lr-warmup-iters 5 (10 samples) is not shorter than --lr-decay-iters 4 (8 samples)",
        ),
        (
            "--lr-warmup-fraction 1 --lr-decay-tokens 24",
            "--lr-warmup-fraction 1.0 (24 tokens) is not shorter than --lr-decay-tokens 24",
        ),
        (
            f"{SAMPLES} --lr-warmup-samples 100",
            "--lr-warmup-samples 100 is not shorter than --train-samples 100",
        ),
        ("--log-interval 0", "--log-interval 0 must be at least 1"),
        ("--tensorboard-log-interval 0", "--tensorboard-log-interval 0 must be at least 1"),
        ("--eval-interval -1", "--eval-interval -1 must be at least 0"),
        ("--eval-iters -1", "--eval-iters -1 must be at least 0"),
        ("--save s --save-interval 0", "--save-interval 0 must be at least 1"),
        ("--clip-grad -1", "--clip-grad -1.0 must be at least 0"),
        ("--weight-decay -1", "--weight-decay -1.0 must be at least 0"),
        ("--adam-beta1 1", "--adam-beta1 1.0 must be at least 0 and less than 1"),
        ("--adam-beta2 -1", "--adam-beta2 -1.0 must be at least 0 and less than 1"),
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
        (
            "--true-vocab-size 10",
            "--true-vocab-size 10 is less than the tokenizer's 11 tokens",
        ),
        (
            "--true-vocab-size 13 --pad-vocab-size-to 12",
            "--pad-vocab-size-to 12 is less than --true-vocab-size 13",
        ),
    ],
)
def test_a_problem_is_told(line, message):
    assert [problem for problem in problems(line) if message in problem]


@pytest.mark.parametrize("flags", [[], ["--train-iters", "9", "--train-samples", "9"]])
def test_the_length_is_given_once(flags):
    config, _ = parse_config([*tiny_argv(without=("--train-iters",)), *flags])
    with pytest.raises(ConfigError, match="give exactly one of --train-iters, --train-samples and"):
        validate(config, world_size=1, device="cpu")


def test_data_are_needed():
    with pytest.raises(ConfigError, match="--data-path is missing: the prefix of a .bin/.idx pair"):
        validate(tiny_config(without=("--data-path",)), world_size=1, device="cpu")


def test_all_problems_are_told_at_once(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("{")
    line = (
        "--hidden-size 9 --max-position-embeddings 5 --fp16 --bf16 --global-batch-size 5 --seed 0 "
        f"--keep-last 2 --clip-grad -1 --zero-stage 7 --deepspeed_config {file}"
    )
    output = problems(line)
    for words in (
        "--hidden-size 9",
        "--max-position-embeddings 5",
        "--fp16 and --bf16",
        "--global-batch-size 5",
        "--seed 0",
        "--keep-last needs --save",
        "--clip-grad -1.0",
        "--zero-stage 7",
        "ds.json is not JSON",
    ):
        assert [problem for problem in output if words in problem], words
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
