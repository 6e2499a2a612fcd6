#!/usr/bin/env python
"""Speed of generation, beside Hugging Face's `generate` with the same weights.

All sides and batch sizes take turns in one process, so that whatever else the machine does falls on
all of them. Random weights, greedy, every sequence of the same length. On CPUs seconds are those of
the CPU, on a GPU those of the wall. The last line is the result as JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, wrap_full_tensor
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.model_plan import plan_model
from megatron.config.network.kernels import plan_kernels
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.kernels_plan import KernelsPlan
from megatron.fused_kernels.registry import choose_inference_kernels
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.runner.decode_graphs import decode_capture
from megatron.inference.runner.model_runner import ModelRunner

Side = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(argv: Sequence[str]) -> None:
    """Measure every dtype and batch size, and print one line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens added to each")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--threads", type=int, default=1, help="threads of all sides")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--static", action="store_true", help="also Hugging Face's static, compiled cache"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    rows = []
    for dtype in args.dtypes:
        theirs = hugging_face(
            args.layers, args.hidden, args.heads, args.vocab, args.prompt + args.new
        )
        theirs = theirs.to(device, DTYPES[dtype])
        sides: dict[str, Side] = {
            "megatron": partial(
                continue_here, engine(theirs, DTYPES[dtype], device, rows=max(args.batches))
            ),
            "Hugging Face": partial(continue_there, theirs),
        }
        if args.static:
            static = {"cache_implementation": "static"}
            sides["Hugging Face, static cache"] = partial(continue_there, theirs, **static)
        speeds: dict[tuple[int, str], list[float]] = {}
        for turn in range(args.rounds + 1):
            for batch, (side, call) in product(args.batches, sides.items()):
                prompts = torch.randint(args.vocab, (batch, args.prompt)).tolist()
                seconds = timed(lambda call=call, prompts=prompts: call(prompts, args.new), device)
                if turn:  # the first turn warms up
                    speeds.setdefault((batch, side), []).append(batch * args.new / seconds)
        for batch in args.batches:
            row: dict[str, Any] = {"dtype": dtype, "sequences at once": batch}
            row |= {side: round(statistics.median(speeds[batch, side]), 1) for side in sides}
            rows.append(row)
            print(" | ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    print(json.dumps({"rows": rows}))


def hugging_face(layers: int, hidden: int, heads: int, vocab: int, length: int) -> GPT2LMHeadModel:
    """Return GPT-2 of these sizes with random weights."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def engine(
    model: GPT2LMHeadModel, dtype: torch.dtype, device: torch.device, *, rows: int
) -> InferenceEngine:
    """Return this program's engine with the weights of `model`."""
    spec, kernels = plan_of(model.config)
    theirs = model.state_dict()
    weights = {
        part.ours: ParameterState(
            weight=wrap_full_tensor(
                part.mapping.from_hugging_face([theirs[name] for name in part.theirs])
            )
        )
        for part in family_of(spec).parts(spec)
    }
    groups = lone_groups()
    stage = ModelRunner(
        spec,
        weights,
        groups=groups,
        capture=decode_capture(spec, groups, device),
        dtype=dtype,
        device=device,
        rows=rows,
        kernels=choose_inference_kernels(kernels, spec, tensor=1, dtype=dtype, device=device),
    )
    return InferenceEngine(stage, rows=rows)


def plan_of(config: GPT2Config) -> tuple[ModelSpec, KernelsPlan]:
    """Return the network of GPT-2's sizes, and the plan of its kernels."""
    flags = (
        f"--num-layers {config.n_layer} --hidden-size {config.n_embd} --lr 0 "
        f"--num-attention-heads {config.n_head} --seq-length {config.n_positions} "
        f"--max-position-embeddings {config.n_positions} --make-vocab-size-divisible-by 1 --micro-batch-size 1"
    )
    parsed, _ = parse_config(flags.split())
    kernels = plan_kernels(parsed.kernels, parsed.model, parsed.precision)
    return plan_model(parsed, vocab_size=config.vocab_size, tensor=1), kernels


def continue_here(
    ours: InferenceEngine, prompts: Sequence[Sequence[int]], new: int
) -> list[list[int]]:
    """Return the new tokens of each prompt."""
    requests = [
        Request(prompt=tuple(prompt), max_new_tokens=new, sampling=SamplingParams(greedy=True))
        for prompt in prompts
    ]
    return [list(completion.tokens) for completion in ours.generate(requests)]


def continue_there(
    theirs: GPT2LMHeadModel, prompts: Sequence[Sequence[int]], new: int, **options: Any
) -> list[list[int]]:
    """Return the same by Hugging Face's `generate` with these options."""
    tokens = torch.tensor(prompts, device=theirs.device)
    found = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return found[:, tokens.size(1) :].tolist()


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call that ends with its tokens on the host."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started_at = clock()
    call()
    return clock() - started_at


if __name__ == "__main__":
    run_tool(main)
