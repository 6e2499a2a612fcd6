"""Compile the Triton kernels, as layers of real sizes launch them, for a GPU that need not exist.

python compile_for_gpu.py CAPABILITY [NAMES]: CAPABILITY is 80 (A100) or 90 (H100). Prints a line of
JSON for each compiled kernel: its name, registers and bytes of local memory (spills) of a thread,
and how many of its loads and stores are of two bytes.
"""

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.knobs import nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from megatron.fused_kernels.triton import launch
from megatron.fused_kernels.triton.all import TRITON

WIDTHS = (2560, 8192, 16384)  # up to 4096 a thread has as many features
VOCABULARIES = (50304, 250880)
DTYPES = (torch.float32, torch.bfloat16)
NARROW = re.compile(r"^\s*(?:@\S+ )?(?:ld|st)\.global(?!\S*\.v\d)\S*\.[bus]16\b", re.MULTILINE)


def main(capability: int) -> None:
    seen = set()
    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **keywords):
        compiled = run(kernel, *args, grid=grid, warmup=True, **keywords)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            print(json.dumps({"kernel": name, **usage(compiled)}))

    JITFunction.run = compile_only
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
    )
    with torch.device("meta"):
        launch._write_one[(1,)](torch.empty(1, dtype=torch.int32))
        for dtype in DTYPES:
            for columns in WIDTHS:
                call_rows(columns, dtype)
            for columns in VOCABULARIES:
                call_cross_entropy(columns, dtype)
            call_attention(dtype)


def usage(compiled) -> dict[str, int]:
    """Registers, local memory, and two-byte accesses of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "two_byte_accesses": len(NARROW.findall(compiled.asm["ptx"])),
        "warps": compiled.metadata.num_warps,
    }


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def call_rows(columns: int, dtype: torch.dtype) -> None:
    """Forward and backward of the operations on rows of features."""
    x, y = (tensor(2048, 8, columns, dtype=dtype) for _ in "xy")
    weight, bias = (tensor(columns, dtype=dtype) for _ in "wb")
    results = [
        TRITON.layer_norm(x, weight, bias, 1e-5),
        TRITON.rms_norm(x, weight, 1e-5),
        *TRITON.add_norm(x, y, bias, weight, bias, 1e-5, True),
        *TRITON.add_norm(x, y, None, weight, None, 1e-5, False),
        *TRITON.add_norm(x, None, None, weight, None, 1e-5, False),
    ]
    if columns == WIDTHS[0]:  # the same kernels for any width
        results += [
            TRITON.bias_gelu(x, bias, "tanh"),
            TRITON.bias_gelu(x, bias, "erf"),
            TRITON.glu(x, None, "swiglu"),
            TRITON.glu(x, tensor(columns, dtype=dtype), "geglu"),
            TRITON.bias_dropout_add(x, bias, y, 0.1, True),
            TRITON.bias_dropout_add(x, None, y, 0.0, True),
        ]
    sum(result.sum() for result in results).backward()


def call_cross_entropy(columns: int, dtype: torch.dtype) -> None:
    """The loss over a full vocabulary with padding, and over two ranks' slices."""
    logits, target = tensor(8, columns, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    TRITON.cross_entropy.full(logits, target, columns - 47).sum().backward()
    largest = TRITON.cross_entropy.largest(logits, columns - 47)
    TRITON.cross_entropy.sums(logits, largest, target, columns - 47)


def call_attention(dtype: torch.dtype) -> None:
    """Rotary positions of few and of many heads, and the softmax over scores."""
    for heads, width in ((16, 64), (96, 128)):
        x = tensor(64, 2, heads, width, dtype=dtype).permute(1, 2, 0, 3)
        cos, sin = (torch.empty(2, 1, 64, width // 2) for _ in "cs")
        TRITON.rotary(x, cos, sin).sum().backward()
        fused, bias = (
            tensor(64, 2, heads, 3, width, dtype=dtype),
            tensor(heads * 3 * width, dtype=dtype),
        )
        for tables in ((cos, sin), None):
            for each in (bias, None):
                query, key, value = TRITON.split_heads(fused, each, tables)
                (query * key * value).sum().backward()
        call_decode_attention(heads, width, dtype)
    for keys in (2048, 16384):
        scores = tensor(1, 2, 16, keys, dtype=dtype)
        mask = torch.empty(1, 1, 16, keys, dtype=torch.bool)
        TRITON.scaled_causal_softmax(scores, 0.5).sum().backward()
        TRITON.scaled_masked_softmax(scores, mask, 0.5).sum().backward()


def call_decode_attention(heads: int, width: int, dtype: torch.dtype) -> None:
    """As many keys as queries; fewer, of long contexts, which programs divide."""
    positions = torch.empty(2, dtype=torch.int64)
    for groups, keys in ((heads, 256), (8, 32768)):
        key = torch.empty(2, groups, 1, width, dtype=dtype)
        cache = (torch.empty(2, groups, keys, width, dtype=dtype),) * 2
        TRITON.decode_attention(
            torch.empty(2, heads, 1, width, dtype=dtype),
            key,
            key,
            cache,
            positions,
            range(keys),
            window=0,
            scale=0.125,
            softcap=0.0,
            slopes_a=None,
            sinks_a=None,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
