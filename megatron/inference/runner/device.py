"""Device of inference: copies from the host without a sync, and attention backends without cuDNN."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def to_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy numbers to `device`; on a GPU from pinned memory, without waiting for its work."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turn off the cuDNN backend of scaled_dot_product_attention.

    It builds an execution plan for each new number of keys, which takes tens of milliseconds on the
    host; lengths of texts differ from call to call.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
