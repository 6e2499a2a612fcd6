"""Plans of published runs and of sizes that one GPU trains."""

from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.planner.devices import device_of

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
