"""Products of 16-bit matrices with 32-bit results: addmm and bmm with `out_dtype`, on GPUs."""

import logging
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product a b to `total`, which may have more bits.

    Shapes: total [m, n], a [m, k], b [k, n].
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and has_wide_products(total.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@cache
def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has these products for `dtype` on this GPU; logs why not.

    Runs one small product of each kind.
    """
    one = torch.ones(1, 16, 16, dtype=dtype, device=device)
    try:
        total = torch.bmm(one, one, out_dtype=torch.float32)[0]
        torch.addmm(total, one[0], one[0], out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        log.warning(
            "torch %s has no products of %s with 32-bit results on %s (%s): --loss-chunk-tokens "
            "rounds what it adds to the gradient of the token table, ring attention multiplies in "
            "32 bits",
            torch.__version__,
            str(dtype).removeprefix("torch."),
            device,
            next(iter(str(error).splitlines()), type(error).__name__),
        )
        return False
    return True
