"""BERT: masked-language-model loss, and the loss of the order of two segments (sentence order)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import LM_LOSS, SOP_LOSS, UNMASKED, ObjectiveName, ObjectivePlan
from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.bert.flags import BertSpec
from megatron.extensions.bert.layers import BertOutput
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.loss import Loss, Losses, next_token_loss
from megatron.objectives.objective import Collate, Objective
from megatron.tensor_parallel.broadcast import Batch, Field, Fields

BERT_FIELDS: Fields = {
    "tokens": Field("bs"),
    "token_types": Field("bs"),
    "positions": Field("bs"),
    "labels": Field("bs"),
    "loss_mask": Field("bs", torch.float32),
    "attention_span": Field("b12"),
    "is_random": Field("b"),
}
"""A batch in which each token sees the real tokens of its sample."""


@OBJECTIVES.register("bert")
class BERT(Objective):
    """Prediction of masked tokens, and with the binary head of which segment came first."""

    name: ObjectiveName = "bert"
    token_fields = ("text",)
    fields = BERT_FIELDS

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `bert_batch`."""
        return bert_batch

    def loss_terms(self, spec: ModelSpec) -> tuple[str, ...]:
        """Return the names of both losses, and of the share of micro-batches without a target."""
        return (LM_LOSS, *([SOP_LOSS] if spec.part(BertSpec).binary_head else []), UNMASKED)

    def loss(self, plan: ObjectivePlan) -> Callable[..., Loss]:
        """Return the builder of the sum of both losses."""
        return bert_loss


def bert_batch(
    text: Tensor,
    types: Tensor,
    labels: Tensor,
    is_random: Tensor,
    loss_mask: Tensor,
    padding_mask: Tensor,
    truncated: Tensor,
) -> Batch:
    """Return a batch of the samples of a BertDataset.

    Padding is at the end of a sample: queries of padding see the real tokens too, so the span is
    the same for all of its tokens.

    Args:
        labels: -1 where nothing is masked.
        types: any value at padding.
        truncated: whether a sample was cut; not used.

    Shapes: text, types, labels, loss_mask, padding_mask [b, s]; is_random, truncated [b]
        -> BERT_FIELDS.
    """
    lengths_b = padding_mask.sum(1)
    positions = torch.arange(text.size(1), device=text.device).expand_as(text).contiguous()
    return {
        "tokens": text,
        "token_types": types * padding_mask,
        "positions": positions,
        "labels": labels.clamp(min=0),
        "loss_mask": loss_mask.float(),
        "attention_span": torch.stack([torch.zeros_like(lengths_b), lengths_b], -1)[:, None],
        "is_random": is_random,
    }


def bert_loss(
    group: dist.ProcessGroup,
    kernels: Kernels = REFERENCE,
    *,
    vocab_size: int | None = None,
    sequence_group: dist.ProcessGroup | None = None,
) -> Loss:
    """Return the mean cross-entropy of the masked tokens plus the sentence-order cross-entropy.

    A micro-batch without a masked token has a masked-LM loss of 0.

    Args:
        vocab_size: columns of the logits that take part in the softmax; all if None.
        sequence_group: ranks that have parts of the same sequences; the mean of their results is
            the loss.

    Communication: as in `next_token_loss`.
    """
    masked_lm_loss = next_token_loss(
        group, kernels, vocab_size=vocab_size, sequence_group=sequence_group
    )
    order_loss = partial(_order_loss, sequence_group=sequence_group)

    def loss(output: BertOutput, batch: Batch) -> Losses:
        lm = masked_lm_loss(output.logits, batch)
        count = batch["loss_mask"].sum()
        if sequence_group and sequence_group.size() > 1:
            dist.all_reduce(count, group=sequence_group)
        terms = {LM_LOSS: lm, UNMASKED: (count == 0).float()}
        if output.order_logits is None:
            return Losses(lm, terms)
        sop = order_loss(output.order_logits, batch["is_random"])
        return Losses(lm + sop, {**terms, SOP_LOSS: sop})

    return loss


def _order_loss(
    order_logits_b2: Tensor, is_random_b: Tensor, *, sequence_group: dist.ProcessGroup | None
) -> Tensor:
    """Return the cross-entropy of whether the segments were swapped.

    Of the ranks that divide a sequence the first has its first token. The loss is the mean over
    all of them, so the first rank's loss is multiplied by their number, and the other ranks' by 0.
    """
    loss = F.cross_entropy(order_logits_b2.float(), is_random_b)
    if sequence_group is None or sequence_group.size() == 1:
        return loss
    return loss * (sequence_group.size() if sequence_group.rank() == 0 else 0)
