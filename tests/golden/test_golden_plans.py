"""What is decided for command lines that large runs had, compared whole."""

import json

from golden_files import require_golden

from megatron.config.config import parse_config
from megatron.config.plan.plan import plan

GPT3_175B = """
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5_859_375
    --train-samples 146_484_375 --lr-decay-samples 126_953_125 --lr-warmup-samples 183_105
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --log-interval 10 --eval-interval 1000 --eval-iters 40 --save-interval 1000 --save checkpoints
    --data-path corpus --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --fp16 --checkpoint-activations
    --DDP-impl local --deepspeed --zero-stage 1
"""

BLOOM_176B = """
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
    --pp-partition-method type:transformer|embedding
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112
    --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 2 --global-batch-size 2048 --rampup-batch-size 192 16 9_765_625
    --train-samples 220_000_000 --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
    --clip-grad 1.0 --weight-decay 1e-1 --init-method-std 0.0048 --bf16 --seed 42
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path bigscience/tokenizer
    --pad-vocab-size-to 250880 --data-path corpus
    --log-interval 1 --save-interval 100 --save checkpoints --load checkpoints
    --eval-interval 1000 --eval-iters 1
    --tensorboard-dir tensorboard --tensorboard-queue-size 5 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
    --checkpoint-activations --deepspeed --deepspeed-activation-checkpointing --zero-stage 0
"""

BLOOM_176B_JSON = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 2048,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def decided(command_line, *, world_size, vocab_size):
    config, _ = parse_config(command_line.split())
    decisions = plan(config, world_size=world_size, vocab_size=vocab_size, device="cuda")
    return json.dumps(decisions.to_dict(), indent=1) + "\n"


def test_gpt3_175b():
    text = decided(GPT3_175B, world_size=1024, vocab_size=50257)
    require_golden("gpt3_175b.plan.json", text)


def test_bloom_176b(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(BLOOM_176B_JSON))
    command_line = f"{BLOOM_176B} --deepspeed_config {file}"
    text = decided(command_line, world_size=384, vocab_size=250680)
    # The log lines of that run end in /115311.
    assert json.loads(text)["training"]["train_iters"] == 115311
    require_golden("bloom_176b.plan.json", text)
