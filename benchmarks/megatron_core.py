#!/usr/bin/env python
"""One measurement of train_gpu.py: the GPT of the package megatron-core, without Transformer Engine.

    python benchmarks/megatron_core.py JOB

JOB is a `Job` of gpu_side.py as JSON; the last line of stdout is the result as JSON. The name of
the package is the name of this project, of which nothing is imported here. Layers are those of its
local spec: PyTorch's norms, attention in separate operations, its own distributed wrapper and
optimizer with fp32 master weights.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

VOCAB_SIZE = 50304
LR = 1e-4


def main() -> None:
    """Measure the job and print the result."""
    job = json.loads(sys.argv[1])
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        print(json.dumps({"error": "not run: needs the package megatron-core"}))
        return
    try:
        result = measure(job)
    except torch.OutOfMemoryError as error:
        result = {"error": f"out of memory: {str(error).splitlines()[0]}"}
    print(json.dumps(result), flush=True)


def measure(job: dict) -> dict:
    """Return the seconds of a step, the loss and the memory."""
    on_gpu = job["device"] == "cuda"
    start(on_gpu)
    model, optimizer = build(job["flags"], bf16=on_gpu)
    device = torch.device(job["device"])
    b, s = job["batch"], job["seq_length"]
    tokens = torch.randint(VOCAB_SIZE, (b, s + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)
    positions = torch.arange(s, device=device).expand(b, s)
    hidden = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)

    def step() -> float:
        model.zero_grad_buffer()
        model.zero_grad()
        loss = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:]).mean()
        loss.backward()
        if on_gpu:  # neither runs on a CPU
            model.finish_grad_sync()
            optimizer.step()
        return float(loss.detach())

    seconds = []
    for _ in range(job["rounds"] + 1):
        started_at = time.perf_counter()
        for _ in range(job["steps"]):
            loss = step()
        seconds.append((time.perf_counter() - started_at) / job["steps"])
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return {"seconds": statistics.median(seconds[1:]), "loss": loss, "peak_bytes": peak}


def start(on_gpu: bool) -> None:
    """Begin the process group of this process alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    store = dist.HashStore()
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if on_gpu:
        model_parallel_cuda_manual_seed(1)
    else:  # to try it: the package takes a GPU for granted
        torch.cuda.current_device = lambda: "cpu"
        get_cuda_rng_tracker().fork = lambda *_: nullcontext()


def build(flags: list[str], *, bf16: bool) -> tuple:
    """Return the network in its distributed wrapper, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parser = argparse.ArgumentParser()
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    sizes = parser.parse_args(flags)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not bf16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=bf16,
        bias_dropout_fusion=bf16,
    )
    network = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB_SIZE,
        sizes.seq_length,
        share_embeddings_and_output_weights=True,
    )
    network = network.to("cuda" if bf16 else "cpu", dtype)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), network
    )
    options = OptimizerConfig(
        optimizer="adam", lr=LR, bf16=bf16, params_dtype=dtype, clip_grad=1.0, weight_decay=0.01
    )
    return model, get_megatron_optimizer(options, [model]) if bf16 else None


if __name__ == "__main__":
    main()
