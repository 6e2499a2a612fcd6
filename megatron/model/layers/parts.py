"""What every layer of a network is built with, beside its spec."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.layers.attention_kernels import CoreAttention
from megatron.tensor_parallel.rng import OrdinaryStream, RngTracker

MixtureBuilder = Callable[..., nn.Module]
"""Builds the mixture of experts (MoE) of a layer from its spec, parts and number."""


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """What every layer of a network is built with, beside its spec.

    Args:
        group: the tensor-parallel ranks.
        core_attention: returns what computes attention in the layer of a number.
        rng: the stream that differs between ranks of `group`.
        kernels: what computes the operations inside the layers.
        build_mixture: builds the MLPs of layers with experts; None for those of inference.
        sequence_parallel: whether the ranks of `group` divide the sequence between layers.
        mixed: whether weights are 16-bit: see `end_of`.
        batch_fields: names of the fields of a batch.
        loss_chunk_tokens: leaves the logits to the loss, as `DeferredLogits`; 0 for none.
    """

    group: dist.ProcessGroup
    core_attention: CoreAttention
    rng: RngTracker = OrdinaryStream()
    kernels: Kernels = REFERENCE
    build_mixture: MixtureBuilder | None = None
    sequence_parallel: bool = False
    mixed: bool = False
    batch_fields: Collection[str] = ()
    loss_chunk_tokens: int = 0

    @property
    def division(self) -> dict[str, Any]:
        """How weights and sequences are divided, as arguments of a parallel linear layer."""
        return {"group": self.group, "sequence_parallel": self.sequence_parallel}
