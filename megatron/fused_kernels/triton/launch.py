"""Launch parameters of Triton kernels: warps and grid."""

import triton


def warps(block: int) -> int:
    """Return how many warps work on a block of so many elements: each thread gets at most 16."""
    return min(16, max(1, block // 512))


def elementwise_grid(numel: int, block: int) -> tuple[int]:
    """Return the grid that covers `numel` elements."""
    return (triton.cdiv(numel, block),)
