"""The training loss: mean cross-entropy of the tokens that count."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from megatron.fused_kernels.dispatch import REFERENCE, Kernels
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy

Loss = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


def next_token_loss(group: dist.ProcessGroup, kernels: Kernels = REFERENCE) -> Loss:
    """Return a function of (logits_bsv, (labels_bs, loss_mask_bs)).

    Shapes: logits_bsv [b, s, V/t], labels_bs [b, s] int64, loss_mask_bs [b, s] -> scalar float32.
    Communication: that of the vocabulary-parallel cross-entropy over `group`.
    """

    def loss(logits_bsv: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        labels_bs, loss_mask_bs = target
        loss_bs = vocab_parallel_cross_entropy(
            logits_bsv, labels_bs, group, local=kernels.cross_entropy
        )
        # Where nothing counts the loss is 0, not 0 / 0.
        return (loss_bs * loss_mask_bs).sum() / loss_mask_bs.sum().clamp(min=1)

    return loss
