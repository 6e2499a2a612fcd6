"""Quantized weights of transformers models, decoded as they are read: MXFP4.

A value of MXFP4 has 4 bits (E2M1: a sign, two bits of exponent, one of mantissa), and 32 neighbours share
a power of two. Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.conversion.model_folder import Reader
from megatron.common.errors import CheckpointError

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
_EXPONENT_BIAS = 127
_BLOCKS, _SCALES = "_blocks", "_scales"


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return how the weights of config.json are quantized: a key of READERS.

    Raises:
        CheckpointError: by a method that is not decoded.
    """
    method = str((config.get("quantization_config") or {}).get("quant_method") or "")
    if method not in READERS:
        raise CheckpointError(
            f"config.json: the weights are quantized by {method}, and mxfp4 alone is decoded: import "
            "the model without quantization"
        )
    return method


class MXFP4Reader(Reader):
    """Reads matrices in MXFP4 under the names that they have without quantization, in fp32.

    Files have two tensors for them, NAME_blocks and NAME_scales, of transposed matrices.
    """

    @property
    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        return (
            name.removesuffix(_BLOCKS)
            for name in super().names
            if not (name.endswith(_SCALES) and self._is_quantized(name.removesuffix(_SCALES)))
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        if not self._is_quantized(name):
            return super().shape(name)
        *experts, rows, groups, size = super().shape(name + _BLOCKS)
        return (*experts, groups * size * 2, rows)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        if not self._is_quantized(name):
            return super().tensor(name)
        return decode_mxfp4(super().tensor(name + _BLOCKS), super().tensor(name + _SCALES)).mT

    def _is_quantized(self, name: str) -> bool:
        return name + _BLOCKS in self._tensors


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode blocks of 4-bit values, two in a byte, of which the lower half comes first.

    Memory: of one matrix, besides the result.

    Shapes: blocks [matrices, rows, groups, 16] uint8, scales [matrices, rows, groups] uint8, exponents
        of two plus 127 -> [matrices, rows, 32 * groups] float32.
    """
    decoded = blocks.new_empty((*blocks.shape[:2], 2 * blocks[0, 0].numel()), dtype=torch.float32)
    for matrix, pairs, exponents in zip(decoded, blocks, scales, strict=True):
        halves = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
        powers = exponents.int()[..., None] - _EXPONENT_BIAS
        matrix.copy_(torch.ldexp(_VALUES[halves.int()], powers).flatten(-2))
    return decoded


READERS: Mapping[str, type[Reader]] = {"": Reader, "mxfp4": MXFP4Reader}
"""Readers of weights by the method of their quantization."""
