"""Limits of the Triton kernels: dtypes and sizes that they do not support."""

import torch

_MOST_FEATURES = 32768  # a row has to fit into the registers of one program
_MOST_HEAD_FEATURES = 32768  # all heads have to fit into the registers of one program
_MOST_KEY_FEATURES = 256  # a block of keys has to fit into shared memory
_MOST_KEYS = 16384  # a row has to fit into the registers of one program
_MOST_ELEMENTS = 2**32 - 1  # the kernel's random offsets are 32-bit
_MOST_QUERY_FEATURES = 8192  # the queries of a key have to fit into the registers of one program


def dtype_limit(dtype: torch.dtype) -> str | None:
    """Return why the kernels do not support `dtype`; None if they do."""
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return f"the kernel computes in 32 bits, too few for {str(dtype).removeprefix('torch.')}"


def softmax_limit(dtype: torch.dtype, keys: int) -> str | None:
    """Return why the kernels do not support rows of so many keys; None if they do."""
    if keys > _MOST_KEYS:
        return f"{keys} keys a row, the kernel takes {_MOST_KEYS} at most"
    return dtype_limit(dtype)


def norm_limit(dtype: torch.dtype, features: int) -> str | None:
    """Return why the kernels do not support rows of so many features; None if they do."""
    if features > _MOST_FEATURES:
        return f"{features} features a row, the kernel takes {_MOST_FEATURES} at most"
    return dtype_limit(dtype)


def dropout_limit(dtype: torch.dtype, elements: int) -> str | None:
    """Return why the kernels do not support so many elements; None if they do."""
    if elements > _MOST_ELEMENTS:
        return f"{elements} elements, the kernel takes {_MOST_ELEMENTS} at most"
    return dtype_limit(dtype)


def rotary_limit(dtype: torch.dtype, heads: int, width: int) -> str | None:
    """Return why the kernels do not support so many heads of this width; None if they do."""
    if heads * width > _MOST_HEAD_FEATURES:
        return f"{heads} heads of {width} features, the kernel takes {_MOST_HEAD_FEATURES} at most"
    return dtype_limit(dtype)


def decode_limit(dtype: torch.dtype, queries: int, width: int) -> str | None:
    """Return why the kernels do not support so many queries of a key, of this width; None if they do."""
    rows, columns = (1 << (size - 1).bit_length() for size in (queries, width))
    if rows * columns > _MOST_QUERY_FEATURES or width > _MOST_KEY_FEATURES:
        return (
            f"{queries} queries of {width} features for each key, the kernel takes keys of "
            f"{_MOST_KEY_FEATURES} features and queries of {_MOST_QUERY_FEATURES} at most"
        )
    return dtype_limit(dtype)
