"""Launch parameters of Triton kernels: warps, grids, and tiles of rows and columns."""

from functools import cache

import torch
import triton
import triton.language as tl

_MOST_TILE_ROWS = 64
_TILES = 8
"""Programs of 4 warps on a multiprocessor that together keep its memory busy."""


def warps(block: int) -> int:
    """Return the number of warps for a block of elements: at most 16, each thread of 16 elements."""
    return min(16, max(1, block // 512))


def elementwise_grid(numel: int, block: int) -> tuple[int]:
    """Return the grid that covers `numel` elements."""
    return (triton.cdiv(numel, block),)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs); an H100's if there is no GPU."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_rows(rows: int, columns: int, block: int, device: torch.device) -> int:
    """Return the rows of a tile of `block` columns, a power of two up to 64.

    Each program sums the columns of a tile: many rows for few partial sums, but no more than leave
    every multiprocessor enough tiles.
    """
    enough = _TILES * num_multiprocessors(device)
    fair = triton.cdiv(rows * triton.cdiv(columns, block), enough)
    return min(_MOST_TILE_ROWS, triton.next_power_of_2(fair))


def tile_grid(rows: int, columns: int, tile: tuple[int, int]) -> tuple[int]:
    """Return the grid of tiles of so many rows and columns."""
    return (triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]),)


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
