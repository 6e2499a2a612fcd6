"""Initial weights that do not depend on the layout: the same seed gives the same model."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.common.errors import ConfigError
from megatron.tensor_parallel.sharding import (
    Shard,
    expert_share_of,
    initial_of,
    mark_initial,
    shard_of,
)

_ROWS = 64  # rows drawn at a time, so that a rank need not draw a whole matrix to keep its shard


@contextmanager
def nan_in_empty_tensors() -> Iterator[None]:
    """Fill tensors of `torch.empty` with NaN, so that `initialise` finds parameters without values."""
    deterministic: Any = torch.utils.deterministic  # whose type leaves its setting out
    fills = deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("warn")  # without torch.compile, which its setter imports
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fills


def initialise(
    model: nn.Module,
    *,
    seed: int,
    std: float,
    num_layers: float,
    xavier: bool = False,
    vocab_size: int | None = None,
) -> None:
    """Draw the initial weights of `model`, by the marks of its parameters: see `Initial`.

    Matrices are drawn from a normal distribution; projections into the residual stream with
    std / sqrt(2 * num_layers). The first matrix of an adapter is drawn evenly from
    +-1 / sqrt(columns), as PEFT does. Biases, norms and the second matrix stay as they are. The
    numbers depend on the seed, the parameter's name and the row, so every shard, every stage and
    every holder of experts gets its part of the same full matrix. A parameter marked with a function
    gets its values for evenly distributed numbers, which depend on the seed and the name.

    Args:
        model: a stage or the full model; its parameter names carry the layers' numbers.
        num_layers: layers of the network with two parts each, such as attention and MLP.
        xavier: draw evenly from +-sqrt(6 / (rows + columns)) of the full matrix instead, whatever
            `std` is and wherever the matrix stands.
        vocab_size: rows of a token table that are no padding; further ones stay 0 and count for no
            matrix's size. All are drawn if None.

    Raises:
        ConfigError: a parameter has no initial value; names each. Those built within
            `nan_in_empty_tensors` are found.

    Source: Radford et al. 2019, section 2.3, for the scale of the residual matrices; Glorot and
    Bengio 2010, equation 16, for xavier.
    """
    residual_std = std / math.sqrt(2 * num_layers)
    empty = []
    for name, parameter in model.named_parameters():
        of_parameter = initial_of(parameter)
        if callable(of_parameter):
            _fill_by_function(parameter, f"{seed}:{name}", of_parameter)
        for key, matrix in _matrices(name, parameter):
            values = initial_of(matrix)
            rows, columns = _whole_shape(matrix)
            drawn = vocab_size if vocab_size and values == "vocabulary" else rows
            if values == "adapter":
                scale, draw = columns**-0.5, _evenly
            elif xavier:
                scale, draw = math.sqrt(6 / (drawn + columns)), _evenly
            else:
                scale, draw = residual_std if values == "residual" else std, _normal
            _fill(matrix, f"{seed}:{key}", scale, draw)
            if drawn < rows:
                _clear_rows(matrix, drawn)
        if parameter.isnan().any():
            empty.append(name)
    if empty:
        raise ConfigError(
            f"no initial values: {', '.join(empty)}; only matrices are drawn (see mark_initial in "
            "megatron.tensor_parallel.sharding): set the values of other parameters in the "
            "constructor of their layer, for instance with torch.zeros instead of torch.empty"
        )


def _matrices(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the random key and the matrix of a parameter, or of each expert of this rank.

    An expert's key has its number among all experts.
    """
    values = initial_of(parameter)
    if values == "constructed" or callable(values):
        return
    if parameter.dim() == 2:
        yield name, parameter
    if parameter.dim() != 3:
        return
    shard, first = shard_of(parameter), expert_share_of(parameter).index * len(parameter)
    for number, matrix in enumerate(parameter.detach().unbind(0)):
        drawn = mark_initial(nn.Parameter(matrix, requires_grad=False), values)
        if shard:
            drawn.shard = Shard(shard.dim - 1, shard.index, shard.count)  # type: ignore[attr-defined]
        yield f"{name}:{first + number}", drawn


@torch.no_grad()
def _fill_by_function(
    parameter: nn.Parameter, key: str, values: Callable[[Tensor], Tensor]
) -> None:
    """Set `parameter` to this rank's shard of `values` of numbers between 0 and 1."""
    shard = shard_of(parameter) or Shard(0, 0, 1)
    shape = [*parameter.shape]
    shape[shard.dim] *= shard.count
    drawn = torch.rand(shape, generator=_generator(key))
    parameter.copy_(values(drawn.chunk(shard.count, shard.dim)[shard.index]))


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
