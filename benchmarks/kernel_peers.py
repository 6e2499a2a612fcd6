#!/usr/bin/env python
"""Speed of fused operations, forward and backward, beside Liger's kernels and PyTorch's operations.

At the sizes of Llama 3 8B. GB/s count inputs, outputs and their gradients once; the time includes a
copy of the outputs' gradients on all sides. The last line is the result as JSON. On a CPU only
PyTorch's operations run, at tiny sizes.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch
from torch import Tensor

from megatron.common.cli import ToolParser, run_tool
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels

TOKENS, WIDTH, MLP_WIDTH, VOCABULARY = 8192, 4096, 14336, 128256
HEADS, HEAD_DIM = 32, 128
TINY = 32
"""What sizes are divided by on a CPU."""

Side = tuple[Callable[..., Any], list[Tensor]]


def main(argv: Sequence[str]) -> None:
    """Time every operation of every side."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = torch.device(parser.parse_args(argv).device)
    kernels, liger = {"PyTorch": REFERENCE}, None
    if device.type == "cuda":
        try:
            from liger_kernel import ops as liger

            from megatron.fused_kernels.triton.all import TRITON
        except ImportError as error:
            print(json.dumps({"error": f"not run: {error}"}))
            return
        kernels = {"megatron": TRITON, **kernels}
    rows = []
    for name, sides in operations(device, liger, kernels):
        rates = {side: rate(call, inputs, device) / 1e9 for side, (call, inputs) in sides.items()}
        row = {"GB/s of": name, **{side: f"{one:.3g}" for side, one in rates.items()}}
        print(" | ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    print(json.dumps({"rows": rows}))


def operations(
    device: torch.device, liger: Any, kernels: dict[str, Kernels]
) -> Iterator[tuple[str, dict[str, Side]]]:
    """Yield the name of an operation, and the call and inputs of each side."""
    small = TINY if device.type == "cpu" else 1
    tokens, width, vocabulary = TOKENS // small, WIDTH // small, VOCABULARY // small
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    def sides(call: Callable[..., Any], inputs: list[Tensor], peer: Side) -> dict[str, Side]:
        ours = {name: (partial(call, one), inputs) for name, one in kernels.items()}
        return ours | ({"Liger": peer} if liger else {})

    x = [draw(tokens, width), draw(width)]
    yield (
        "RMSNorm",
        sides(
            lambda k, x, w: k.rms_norm(x, w, 1e-5),
            x,
            (lambda *x: liger.LigerRMSNormFunction.apply(*x, 1e-5), x),
        ),
    )
    features = MLP_WIDTH // small
    halves = [draw(tokens, features), draw(tokens, features)]
    yield (
        "SwiGLU",
        sides(
            lambda k, x: k.glu(x, None, "swiglu"),
            [draw(tokens, 2 * features)],
            (lambda *x: liger.LigerSiLUMulFunction.apply(*x), halves),
        ),
    )
    heads = [draw(1, HEADS // small, tokens, HEAD_DIM) for _ in range(2)]
    angles = torch.rand(tokens, HEAD_DIM // 2, device=device)
    tables = angles.cos(), angles.sin()
    twice = [torch.cat([table, table], -1)[None].to(dtype) for table in tables]
    yield (
        "rotary",
        sides(
            lambda k, *qk: [k.rotary(x, *tables) for x in qk],
            heads,
            (lambda q, k: liger.LigerRopeFunction.apply(q, k, *twice), heads),
        ),
    )
    logits, target = [draw(tokens, vocabulary)], torch.randint(vocabulary, (tokens,), device=device)
    yield (  # of a copy: both kernels write the gradient into their input
        "cross-entropy of a copy",
        sides(
            lambda k, x: k.cross_entropy.full(x * 1, target, vocabulary).mean(),
            logits,
            (lambda x: liger.LigerCrossEntropyFunction.apply(x * 1, target, None)[0], logits),
        ),
    )


def rate(call: Callable[..., Any], inputs: list[Tensor], device: torch.device) -> float:
    """Return bytes of inputs, outputs and their gradients per second of both passes."""
    outputs = call(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    grads = [torch.ones_like(output) for output in outputs]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    warm, times = (5, 50) if device.type == "cuda" else (0, 1)
    for turn in range(warm + times):
        if turn == warm:
            wait()
            started_at = time.perf_counter()
        found = call(*inputs)
        # Some backward passes write into the gradient that they are given.
        torch.autograd.grad(found, inputs, [grad.clone() for grad in grads])
    wait()
    seconds = (time.perf_counter() - started_at) / times
    return 2 * sum(x.nbytes for x in (*inputs, *outputs)) / seconds


if __name__ == "__main__":
    run_tool(main)
