"""Launch parameters of Triton kernels: warps, grids, and tiles of rows and columns."""

from functools import cache

import torch
import triton
import triton.language as tl

TILE_ROWS = 64
"""Rows of a tile: each program sums the columns of so many rows, so partial sums are few."""


def warps(block: int) -> int:
    """Return the number of warps for a block of elements: at most 16, each thread of 16 elements."""
    return min(16, max(1, block // 512))


def elementwise_grid(numel: int, block: int) -> tuple[int]:
    """Return the grid that covers `numel` elements."""
    return (triton.cdiv(numel, block),)


def tile_grid(rows: int, columns: int, block: int) -> tuple[int]:
    """Return the grid of tiles of `TILE_ROWS` rows and `block` columns."""
    return (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, block),)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs); that of an H100 without a GPU."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def tile_of(columns, BLOCK: tl.constexpr):
    """Return the index of this program's row chunk (int64), and the first of its columns."""
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    return program // blocks, (program % blocks * BLOCK).to(tl.int32)


@triton.jit
def _write_one(out):
    tl.store(out, 1)


def launch_once(device: torch.device) -> None:
    """Compile and launch a trivial kernel; raises what Triton raises where it cannot."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(out):
        _write_one[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel ran without an effect")
