"""Dtypes that Triton kernels do not support."""

import torch


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """Return why Triton kernels do not support `dtype`; None if they do."""
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return f"the kernel computes in 32 bits, too few for {str(dtype).removeprefix('torch.')}"
