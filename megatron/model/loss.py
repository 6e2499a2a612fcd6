"""The training loss: mean cross-entropy of the tokens that count."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.layers.deferred_logits import DeferredLogits
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


class Losses(NamedTuple):
    """A loss of several terms: the scalar that is trained, and what is logged, by name.

    Args:
        total: what backward begins with.
        terms: means over the micro-batch; terms whose name ends with " loss" are logged as losses.
    """

    total: Tensor
    terms: dict[str, Tensor]


Loss = Callable[[Any, Batch], Tensor | Losses]
"""Called with the output of the last layer and a batch."""


def next_token_loss(
    group: dist.ProcessGroup,
    kernels: Kernels = REFERENCE,
    *,
    vocab_size: int | None = None,
    num_expected: Callable[[int], float] | None = None,
    mean_count: Callable[[], Tensor] | None = None,
    sequence_group: dist.ProcessGroup | None = None,
) -> Callable[[Tensor | DeferredLogits, Batch], Tensor]:
    """Return the cross-entropy loss of logits, and a batch's `labels` and `loss_mask`.

    Deferred logits are computed here, a chunk of tokens at a time.

    Args:
        vocab_size: columns of the logits that take part in the softmax; all if None.
        num_expected: tokens that count in a sample of s on average, when how many do is drawn;
            the sum is divided by that, so that a token weighs the same in every sample.
        mean_count: mean number of tokens that count in the micro-batches of a step, by which the sum
            is divided, so that a token weighs the same in every micro-batch.
        sequence_group: ranks that have parts of the same sequences; the mean of their results is
            the loss.

    Shapes: logits_bsv [b, s, V/t], labels [b, s] int64, loss_mask [b, s] -> scalar float32.
    Communication: vocabulary-parallel cross-entropy over `group`; an all-reduce of a
        scalar over `sequence_group`.
    """
    parts = sequence_group.size() if sequence_group else 1
    token_loss = partial(
        vocab_parallel_cross_entropy,
        group=group,
        local=kernels.cross_entropy,
        vocab_size=vocab_size,
    )

    def loss(logits_bsv: Tensor | DeferredLogits, batch: Batch) -> Tensor:
        labels_bs, loss_mask_bs = batch["labels"], batch["loss_mask"]
        if isinstance(logits_bsv, DeferredLogits):
            total = logits_bsv.weighted_loss(labels_bs, loss_mask_bs, token_loss)
        else:
            total = (token_loss(logits_bsv, labels_bs) * loss_mask_bs).sum()
        if num_expected:
            samples, s = labels_bs.shape
            return total / (samples * num_expected(s * parts) / parts)
        if mean_count:
            return total / mean_count()
        count = loss_mask_bs.sum()
        if parts > 1:
            dist.all_reduce(count, group=sequence_group)
        # Where nothing counts the loss is 0, not 0 / 0.
        return total * parts / count.clamp(min=1)

    return loss


def position_weights(s: int) -> Tensor:
    """Return how much each of s positions counts when early ones, seldom targets, count more.

    The weights of a sample are s together.

    Shapes: -> [s] float64.
    Source: 2 (s - i) / (s + 1), BigScience's Megatron-DeepSpeed.
    """
    return 2 * torch.arange(s, 0, -1, dtype=torch.float64) / (s + 1)


def num_expected_targets(s: int, *, targets_only: bool, reweights: bool) -> float:
    """Return the mean sum of weights of a sample over all lengths of its prefix, 1 to s."""
    weights = position_weights(s) if reweights else torch.ones(s, dtype=torch.float64)
    # Position i predicts a target when the prefix is at most i + 1 long.
    chances = torch.arange(1, s + 1, dtype=torch.float64) / s
    return float((weights * chances if targets_only else weights).sum())
