"""Runs whose speed was published, as command lines of this program."""

from dataclasses import dataclass, replace

from megatron.planner.devices import Device, device_of

A100, H100 = device_of("a100-80gb"), device_of("h100-80gb")
# 96 GB of HBM2e; the power limit of 500 W, of 700, is not known to a Device.
H100_HBM2E = replace(H100, name="h100 (500 W)", memory_gb_s=2400)


@dataclass(frozen=True)
class Run:
    """A run of which one figure was published.

    Args:
        published: seconds of a step, tokens per second and GPU, or TFLOP/s per GPU with what is
            recomputed, by `unit`.
    """

    name: str
    source: str
    device: Device
    num_gpus: int
    vocab_size: int
    flags: str
    published: float
    unit: str

    def step_s(self, *, tokens: int, flops: float) -> float:
        """Return the published time of a step of so many tokens and operations, of all GPUs."""
        if self.unit == "seconds":
            return self.published
        if self.unit == "TFLOP/s":
            return flops / (self.published * 1e12 * self.num_gpus)
        return tokens / (self.published * self.num_gpus)


_FULL = "--checkpoint-activations"
_SELECTIVE = "--recompute-activations --sequence-parallel"
# Megatron-LM of 2021 and 2022: scores written out, gradients reduced after the last backward pass.
_MEGATRON = "--fp16 --zero-stage 0 --seq-length 2048 --attention-impl fused-softmax"
_22B = f"""{_MEGATRON} --num-layers 48 --hidden-size 6144 --num-attention-heads 64
    --tensor-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 4"""
_175B = f"""{_MEGATRON} --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --tensor-model-parallel-size 8 --micro-batch-size 1"""
_EIGHT_STAGES = """--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 4
    --global-batch-size 64"""
_530B = f"""{_MEGATRON} --num-layers 105 --hidden-size 20480 --num-attention-heads 128
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 35
    --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1 --global-batch-size 280"""
_BLOOM = f"""{_FULL} --bf16 --zero-stage 1 --attention-impl fused-softmax --preset bloom-176b
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
    --pp-partition-method type:transformer|embedding --pad-vocab-size-to 250880
    --micro-batch-size 2 --global-batch-size 2048"""
_SHARDED = "--bf16 --zero-stage 3 --attention-dropout 0 --hidden-dropout 0"
_MPT = f"{_SHARDED} --seq-length 2048"
# Its recomputation by operation keeps every second product: about as much as half of the layers.
_LLAMA = f"""{_SHARDED} --preset llama-3-8b --seq-length 8192 --recompute-granularity full
    --recompute-method block --recompute-num-layers 16"""

_CLUSTERS, _RECOMPUTATION = "arXiv:2104.04473, section 5.1", "arXiv:2205.05198, table 5"
_FOUNDRY = "llm-foundry, scripts/train/benchmarking"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412"
_TITAN_ASYNC = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06"

RUNS = (
    Run("GPT-3 175B, all recomputed", _CLUSTERS, A100, 1024, 50257,
        f"{_175B} {_FULL} --pipeline-model-parallel-size 16 --global-batch-size 1536",
        140, "TFLOP/s"),
    Run("GPT 22B, all recomputed", _RECOMPUTATION, A100, 8, 51200,
        f"{_22B} {_FULL}", 1.42, "seconds"),
    Run("GPT 22B, selective", _RECOMPUTATION, A100, 8, 51200,
        f"{_22B} {_SELECTIVE}", 1.10, "seconds"),
    Run("GPT 175B, all recomputed", _RECOMPUTATION, A100, 64, 51200,
        f"{_175B} {_EIGHT_STAGES} {_FULL}", 18.13, "seconds"),
    Run("GPT 175B, selective", _RECOMPUTATION, A100, 64, 51200,
        f"{_175B} {_EIGHT_STAGES} {_SELECTIVE}", 13.75, "seconds"),
    Run("GPT 530B, selective", _RECOMPUTATION, A100, 280, 51200,
        f"{_530B} {_SELECTIVE}", 37.83, "seconds"),
    Run("BLOOM 176B", "arXiv:2211.05100 and its training log", A100, 384, 250680,
        _BLOOM, 105, "seconds"),
    Run("MPT 1B", _FOUNDRY, H100, 8, 50368,
        f"{_MPT} --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
        "--micro-batch-size 14 --global-batch-size 112", 45455, "tokens/s"),
    Run("MPT 7B", _FOUNDRY, H100, 8, 50368,
        f"{_MPT} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--micro-batch-size 6 --global-batch-size 48", 10643, "tokens/s"),
    Run("MPT 30B, all recomputed", _FOUNDRY, H100, 32, 50368,
        f"{_MPT} {_FULL} --num-layers 48 --hidden-size 7168 --num-attention-heads 64 "
        "--micro-batch-size 14 --global-batch-size 1344", 2308, "tokens/s"),
    Run("Llama 3.1 8B, ZeRO 3", _TITAN, H100_HBM2E, 8, 128256,
        f"{_LLAMA} --micro-batch-size 2 --global-batch-size 16", 6667, "tokens/s"),
    Run("Llama 3.1 8B, ZeRO 3, TP 8", _TITAN_ASYNC, H100_HBM2E, 64, 128256,
        f"{_LLAMA} --tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 12 "
        "--global-batch-size 96", 4378, "tokens/s"),
)  # fmt: skip
