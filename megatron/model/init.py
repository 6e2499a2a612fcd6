"""Initial weights that do not depend on the layout: the same seed gives the same model."""

import hashlib
import math

import torch
from torch import nn

from megatron.parallel.sharding import Shard, shard_of

_ROWS = 64  # rows drawn at a time, so that a rank need not draw a whole matrix to keep its shard
_RESIDUAL = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")


def initialise(model: nn.Module, *, seed: int, std: float, num_layers: int) -> None:
    """Draw every matrix of `model` from a normal distribution; biases and norms are left alone.

    Matrices in front of the residual stream get std / sqrt(2 * num_layers). The numbers depend on
    the seed, the parameter's name and the row, so every shard and every stage gets its part of
    the same whole.

    Args:
        model: a stage or the whole; its parameter names carry the layers' numbers.

    Source: Radford et al. 2019, section 2.3, for the scale of the residual matrices.
    """
    residual_std = std / math.sqrt(2 * num_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = residual_std if name.endswith(_RESIDUAL) else std
            _fill(parameter, f"{seed}:{name}", scale)


@torch.no_grad()
def _fill(parameter: nn.Parameter, key: str, std: float) -> None:
    rows, columns = parameter.shape
    shard = shard_of(parameter) or Shard(0, 0, 1)
    first_row = shard.index * rows if shard.dim == 0 else 0
    first_column = shard.index * columns if shard.dim == 1 else 0
    whole_columns = columns * shard.count if shard.dim == 1 else columns
    for block in range(first_row // _ROWS, -(-(first_row + rows) // _ROWS)):
        drawn = _normal(f"{key}:{block}", whole_columns) * std
        start = block * _ROWS - first_row
        low, high = max(0, -start), min(_ROWS, rows - start)
        wanted = drawn[low:high, first_column : first_column + columns]
        parameter[start + low : start + high] = wanted.to(parameter)


def _normal(key: str, columns: int) -> torch.Tensor:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(_ROWS, columns, generator=generator)
