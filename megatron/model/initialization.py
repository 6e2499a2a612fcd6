"""Initial weights that do not depend on the layout: the same seed gives the same model."""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megatron.tensor_parallel.linear import DOWN, UP
from megatron.tensor_parallel.sharding import Shard, expert_share_of, shard_of

_ROWS = 64  # rows drawn at a time, so that a rank need not draw a whole matrix to keep its shard
_TABLE = "word_embeddings.weight"
_RESIDUAL = (
    "self_attention.dense.weight",
    "inter_attention.dense.weight",
    ".dense_4h_to_h.weight",
)


def initialise(
    model: nn.Module,
    *,
    seed: int,
    std: float,
    num_layers: int,
    xavier: bool = False,
    vocab_size: int | None = None,
) -> None:
    """Draw every matrix of `model` from a normal distribution; biases and norms are left alone.

    The first matrix of an adapter is drawn evenly from +-1 / sqrt(columns), as PEFT does, and the
    second stays 0. Matrices in front of the residual stream get std / sqrt(2 * num_layers). The
    numbers depend on the seed, the parameter's name and the row, so every shard, every stage and
    every holder of experts gets its part of the same whole.

    Args:
        model: a stage or the whole; its parameter names carry the layers' numbers.
        xavier: draw evenly from +-sqrt(6 / (rows + columns)) of the whole matrix instead, whatever
            `std` is and wherever the matrix stands.
        vocab_size: rows of a token table that are no padding; further ones stay 0 and count for no
            matrix's size. All are drawn if None.

    Source: Radford et al. 2019, section 2.3, for the scale of the residual matrices; Glorot and
    Bengio 2010, equation 16, for xavier.
    """
    residual_std = std / math.sqrt(2 * num_layers)
    matrices = (each for named in model.named_parameters() for each in _matrices(*named))
    for name, number, parameter in matrices:
        if parameter.dim() == 2:
            key = f"{seed}:{name}{number}"
            rows, columns = _whole_shape(parameter)
            drawn = vocab_size if vocab_size and name.endswith(_TABLE) else rows
            if name.endswith(UP):
                continue
            if name.endswith(DOWN):
                _fill(parameter, key, columns**-0.5, _evenly)
            elif xavier:
                _fill(parameter, key, math.sqrt(6 / (drawn + columns)), _evenly)
            else:
                _fill(parameter, key, residual_std if name.endswith(_RESIDUAL) else std, _normal)
            if drawn < rows:
                _clear_rows(parameter, drawn)


def _matrices(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield a matrix, or those of all experts of this rank with their numbers among all experts."""
    if parameter.dim() < 3:
        # Biases of experts are one tensor with a row for each.
        if not (parameter.dim() == 2 and name.endswith(".bias")):
            yield name, "", parameter
        return
    shard, first = shard_of(parameter), expert_share_of(parameter).index * len(parameter)
    for number, matrix in enumerate(parameter.detach().unbind(0)):
        own = nn.Parameter(matrix, requires_grad=False)
        if shard:
            own.shard = Shard(shard.dim - 1, shard.index, shard.count)  # type: ignore[attr-defined]
        yield name, f":{first + number}", own


@torch.no_grad()
def _clear_rows(parameter: nn.Parameter, first: int) -> None:
    """Set the rows from `first` of the whole matrix on to 0."""
    shard = shard_of(parameter) or Shard(0, 0, 1)
    parameter[max(0, first - shard.index * len(parameter)) :] = 0


@torch.no_grad()
def _fill(
    parameter: nn.Parameter, key: str, scale: float, draw: Callable[[str, int], Tensor]
) -> None:
    rows, columns = parameter.shape
    shard = shard_of(parameter) or Shard(0, 0, 1)
    first_row = shard.index * rows if shard.dim == 0 else 0
    first_column = shard.index * columns if shard.dim == 1 else 0
    _, whole_columns = _whole_shape(parameter)
    for block in range(first_row // _ROWS, -(-(first_row + rows) // _ROWS)):
        drawn = draw(f"{key}:{block}", whole_columns) * scale
        start = block * _ROWS - first_row
        low, high = max(0, -start), min(_ROWS, rows - start)
        wanted = drawn[low:high, first_column : first_column + columns]
        parameter[start + low : start + high] = wanted.to(parameter)


def _whole_shape(parameter: nn.Parameter) -> tuple[int, int]:
    rows, columns = parameter.shape
    shard = shard_of(parameter) or Shard(0, 0, 1)
    return (rows * shard.count, columns) if shard.dim == 0 else (rows, columns * shard.count)


def _normal(key: str, columns: int) -> Tensor:
    """Return [_ROWS, columns] with mean 0 and standard deviation 1."""
    return torch.randn(_ROWS, columns, generator=_generator(key))


def _evenly(key: str, columns: int) -> Tensor:
    """Return [_ROWS, columns] between -1 and 1."""
    return 2 * torch.rand(_ROWS, columns, generator=_generator(key)) - 1


def _generator(key: str) -> torch.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
