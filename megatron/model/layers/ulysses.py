"""Ulysses: ranks that divide a sample's sequence exchange it for heads inside attention."""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from megatron.model.layers.attention_kernels import Attend, Weighing
from megatron.model.layers.layer_input import once
from megatron.tensor_parallel.collectives import all_to_all


class UlyssesAttention:
    """Attend to whole sequences with a part of the heads.

    Args:
        attend: what computes attention.
        group: the ranks that divide the sequence; their number divides the heads of a rank.

    Shapes: query [b, a, s/n, d], key and value [b, g, s/n, d] -> [b, a, s/n, d], n the group's
        size; `attend` gets [b, a/n, s, d] and [b, g/n, s, d].
    Communication: four all-to-alls forward (query, key, value, result), four backward.
    Source: arXiv:2309.14509, section 3.
    """

    def __init__(self, attend: Attend, group: dist.ProcessGroup):
        self.attend, self.group = attend, group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: Weighing) -> Tensor:
        """Return the mixed values of this rank's positions. The mask is that of all positions."""
        query, key, value = (
            all_to_all(x, scatter=1, gather=2, group=self.group) for x in (query, key, value)
        )
        slopes_a = how.slopes_a
        if slopes_a is not None:
            ranks, rank = self.group.size(), self.group.rank()
            own_a = once(how.mask.derived, "own slopes", lambda: slopes_a.chunk(ranks)[rank])
            how = replace(how, slopes_a=own_a)
        mixed = self.attend(query, key, value, how)
        return all_to_all(mixed, scatter=2, gather=1, group=self.group)
