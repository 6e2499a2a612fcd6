"""What no Triton kernel here can take, in words."""

import torch


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """Return why tensors of `dtype` are left to the reference; None when they are not."""
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return f"the kernel computes in 32 bits, too few for {str(dtype).removeprefix('torch.')}"
