"""Command lines in use for years are read and decided as they are, at their own sizes."""

import json
from functools import reduce

import pytest
from ds_json import PIPELINE_AND_ZERO_JSON

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.plan.plan import plan

DATA = "--vocab-file V --merge-file M --data-path D"

ONE_NODE = f"""
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015
    --min-lr 1.0e-5 --lr-decay-style cosine --train-iters 500000 --lr-decay-iters 320000
    --data-impl mmap --split 949,50,1 --distributed-backend nccl --weight-decay 1e-2
    --clip-grad 1.0 --lr-warmup-fraction .01 --fp16 --log-interval 10 --save-interval 500
    --eval-interval 100 --eval-iters 10 --checkpoint-activations --save C --load C {DATA}
"""

PIPELINE_AND_ZERO = f"""
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --distributed-backend nccl
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 1 --rampup-batch-size 2 2 1_000
    --global-batch-size 16 --train-samples 10_000 --optimizer adam --adam-beta1 0.9
    --adam-beta2 0.95 --adam-eps 1e-8 --lr 1e-4 --lr-warmup-samples 5 --clip-grad 1.0
    --weight-decay 1e-1 --fp16 --log-interval 10 --save-interval 50 --eval-interval 100
    --eval-iters 10 --checkpoint-activations --codecarbon-dir CC --save C --load C {DATA}
    --tensorboard-dir TB --tensorboard-queue-size 5 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
    --deepspeed --deepspeed_config JSON --zero-stage 1 --deepspeed-activation-checkpointing
"""
CODEPARROT = f"""
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 12 --global-batch-size 192 --lr 0.0005
    --train-iters 150000 --lr-decay-iters 150000 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay .1 --adam-beta2 .999 --fp16 --log-interval 10 --save-interval 2000
    --eval-interval 200 --eval-iters 10 --save C --load C {DATA}
"""

TR1_13B = f"""
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 40
    --hidden-size 5120 --ffn-hidden-size 20480 --num-attention-heads 40 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 1 --rampup-batch-size 16 16 5_000_000
    --global-batch-size 1024 --train-samples 300_000_000 --loss-scale 12
    --init-method-std 0.02 --fp16 --seed 42 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.999
    --adam-eps 1e-8 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine
    --lr-decay-samples 126_953_125 --lr-warmup-samples 216_320 --clip-grad 1.0
    --weight-decay 1e-1 --exit-duration-in-mins 1190 --log-interval 10 --save-interval 300
    --eval-interval 1000 --eval-iters 5 --codecarbon-dir CC --tensorboard-dir TB
    --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
    --log-validation-ppl-to-tensorboard --save C --load C --data-impl mmap --split 900,100,0
    --distributed-backend nccl --checkpoint-activations --deepspeed --deepspeed_config JSON
    --zero-stage 1 --deepspeed-activation-checkpointing {DATA}
"""

TR11_176B = """
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
    --pp-partition-method type:transformer|embedding --num-layers 70 --hidden-size 14336
    --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048
    --train-samples 220_000_000 --init-method-std 0.0048 --embed-layernorm --bf16 --seed 42
    --position-embedding-type alibi --checkpoint-activations --pad-vocab-size-to 250880
    --sync-tp-duplicated-parameters --abort-on-unmet-fused-kernel-constraints
    --kill-switch-path KILL --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path bigscience/tokenizer --optimizer adam --adam-beta1 0.9
    --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine
    --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 --clip-grad 1.0
    --weight-decay 1e-1 --exit-duration-in-mins 5990 --log-interval 1 --save-interval 100
    --eval-interval 1000 --eval-iters 1 --tensorboard-dir TB --tensorboard-queue-size 5
    --log-timers-to-tensorboard --log-batch-size-to-tensorboard
    --log-validation-ppl-to-tensorboard --save C --load C
    --train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path valid.txt
    --data-impl mmap --distributed-backend nccl --num-workers 2 --valid-num-workers 0
    --deepspeed --deepspeed_config JSON --zero-stage 0 --deepspeed-activation-checkpointing
"""
# 72 stages of 70 layers: the two embeddings count as well.
TR13_176B_MTF = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 72
    --pp-partition-method type:transformer|embedding --num-layers 70 --hidden-size 14336
    --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 1 --global-batch-size 2048 --train-samples 6_348_800
    --init-method-std 0.0048 --embed-layernorm --bf16 --seed 42
    --position-embedding-type alibi --checkpoint-activations --pad-vocab-size-to 250880
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path bigscience/tokenizer
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 2e-5
    --lr-decay-style constant --lr-warmup-samples 0 --clip-grad 1.0 --weight-decay 1e-4
    --log-interval 1 --save-interval 249 --save C --eval-interval 125 --eval-iters 10
    --train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path valid.txt
    --deepspeed --deepspeed_config JSON --zero-stage 0
"""
TR13_176B_MTF_JSON = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2048}

TR11_176B_JSON = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 2048,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}

ZERO_3_OF_DEEPSPEED_FORK = f"""
    --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95
    --tensor-model-parallel-size 1 --init-method-std 0.006 --lr-decay-tokens 300000000000
    --lr-warmup-tokens 375000000 --micro-batch-size 16 --exit-duration-in-mins 30000000
    --global-batch-size 256 --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000
    --train-samples 4000000 --lr 3.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 98,2,0
    --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 1000
    --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --load C --save C
    --no-masked-softmax-fusion --tensorboard-queue-size 1 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir TB
    --data-impl mmap --deepspeed --deepspeed_config JSON --zero-stage 3
    --pipeline-model-parallel-size 1 --no-pipeline-parallel --checkpoint-activations
    --deepspeed-activation-checkpointing {DATA}
"""
ZERO_3_JSON = PIPELINE_AND_ZERO_JSON | {
    "train_micro_batch_size_per_gpu": 16,
    "train_batch_size": 256,
    "zero_optimization": {"stage": 3},
}

COMMANDS = {
    "one node": (ONE_NODE, {}, 1, 500_000),
    "pipeline and ZeRO": (PIPELINE_AND_ZERO, PIPELINE_AND_ZERO_JSON, 4, 748),
    "a ramp over two replicas": (PIPELINE_AND_ZERO, PIPELINE_AND_ZERO_JSON, 8, 748),
    "CodeParrot": (CODEPARROT, {}, 16, 150_000),
    "tr1-13B": (TR1_13B, PIPELINE_AND_ZERO_JSON | {"train_batch_size": 1024}, 128, 311_541),
    "tr11-176B": (TR11_176B, TR11_176B_JSON, 384, 115_311),
    "tr13-176B-mtf": (TR13_176B_MTF, TR13_176B_MTF_JSON, 288, 3_100),
    "ZeRO-3 of DeepSpeed's fork": (ZERO_3_OF_DEEPSPEED_FORK, ZERO_3_JSON, 16, 15_625),
}
"""Each with its JSON, the number of its GPUs, and the steps that it takes."""


def decided(command, settings, world_size, folder):
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_text(f'"{name}: 0.7 0:0.95 A, 0.3 0:0.95 B"\n')
    (folder / "ds.json").write_text(json.dumps(settings))
    places = {"JSON": "ds.json", "train.txt": "train.txt", "valid.txt": "valid.txt"}
    words = [str(folder / places[word]) if word in places else word for word in command.split()]
    config, notices = parse_config(words)
    decisions = plan(config, world_size=world_size, vocab_size=50257, device="cuda")
    return decisions, notices


@pytest.mark.parametrize("name", COMMANDS)
def test_a_known_command_is_decided_as_it_is(name, tmp_path):
    command, settings, world_size, steps = COMMANDS[name]
    decisions, notices = decided(command, settings, world_size, tmp_path)
    assert decisions.parallel.world_size == world_size
    assert decisions.training.train_iters == steps
    for key in settings:
        if key not in ("train_batch_size", "zero_optimization"):
            own, merged = settings[key], decisions.deepspeed[key]
            # Sections keep what the JSON sets, and may gain keys that it leaves out.
            assert merged == (merged | own if isinstance(own, dict) else own)
    # Flags accepted without effect are reported, one by one.
    deaf = {flag.option for flag in LEGACY} & set(command.split())
    assert {flag for notice in notices for flag in notice.partition(":")[0].split(", ")} == deaf


def of(decisions, path):
    return reduce(getattr, path.split("."), decisions)


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("--use-deepspeed", "optimizer.name", "adam"),
        ("--optimizer fused_adam", "optimizer.name", "adam"),
        ("--model-parallel-size 4", "parallel.tensor", 4),
        ("--DDP-impl local", "parallel.data", 8),
        ("--DDP-impl torch", "parallel.data", 8),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "recompute.method",
            "block",
        ),
        ("--recompute-activations", "recompute.granularity", "selective"),
        ("--use-distributed-optimizer", "parallel.zero_stage", 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "parallel.sequence_parallel", True),
        ("--no-bias-gelu-fusion", "kernels.unfused", ("activation",)),
        ("--finetune", "checkpoint.loads_progress", False),
        ("--skip-train", "evaluation.only", True),
        ("--kill-switch-file F", "training.kill_switch", "F"),
        ("--optimizer-cpu-offload", "optimizer.on_cpu", True),
        ("--group-query-attention --num-key-value-heads 4", "model.attention.num_query_groups", 4),
        (
            "--use-rotary-position-embeddings --rotary-position-embeddings-theta 5e5",
            "model.positions.rotary_base",
            5e5,
        ),
    ],
)
def test_a_spelling_of_tutorials_means_what_it_says(flags, path, value, tmp_path):
    base = CODEPARROT.replace("--save C --load C", "--load C")
    base = base.replace("--save-interval 2000", "")
    decisions, _ = decided(f"{base} {flags}", {}, 8, tmp_path)
    assert of(decisions, path) == value


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("--max-seq-length 8", "--seq-length"),
        ("--num-experts-switch 2", "--num-experts"),
        ("--check-for-spiky-loss", "--spike-policy"),
        ("--iterations-to-skip 4 5", "--skip-train-iteration-range"),
        ("--load-tag global_step100", "--ckpt-step with the iteration"),
        ("--noise-density 0.15", "--mask-prob"),
    ],
)
def test_what_cannot_be_done_ends_with_what_to_write(flags, instead):
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{ONE_NODE} {flags}".split())
    (problem,) = caught.value.problems
    assert problem.startswith(f"{flags.split()[0]}: ")
    assert instead in problem


def test_the_optimizer_of_bitsandbytes_comes_with_a_norm_of_the_embedding(tmp_path, modules):
    modules("bitsandbytes.optim", AdamW8bit=None)
    decisions, _ = decided(f"{CODEPARROT} --use-bnb-optimizer", {}, 8, tmp_path)
    assert decisions.optimizer.impl == "bitsandbytes"
    assert decisions.model.norm.embed_layernorm
