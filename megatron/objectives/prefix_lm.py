"""Prefix language modelling: next tokens, from all before and all of a prefix of random length.

Source: arXiv:1910.10683, section 3.2.3.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.model.loss import Loss, next_token_loss, num_expected_targets, position_weights
from megatron.objectives.gpt import GPT, PACKED, SPAN_FIELDS, gpt_batch
from megatron.objectives.objective import Collate
from megatron.tensor_parallel.broadcast import Batch


@OBJECTIVES.register("prefix-lm")
class PrefixLM(GPT):
    """Next-token prediction in which the tokens of a prefix see each other."""

    name: ObjectiveName = "prefix-lm"
    fields = SPAN_FIELDS

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `prefix_batch` for these masks."""
        return partial(prefix_batch, masks=masks, eod=eod, objective=plan)

    def loss(self, plan: ObjectivePlan) -> Callable[..., Loss]:
        """Return the cross-entropy over the expected number of targets, which is drawn."""
        expected = partial(
            num_expected_targets, targets_only=plan.targets_only, reweights=plan.reweights
        )
        return partial(next_token_loss, num_expected=expected)


def prefix_batch(
    tokens: Tensor,
    prefix_ends: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> Batch:
    """Return a batch for prefix language modelling, of samples of a PrefixDataset.

    The first token that is a target is the first one after the prefix.

    Shapes: tokens, prefix_ends [b, s + 1] -> SPAN_FIELDS.
    """
    batch = gpt_batch(tokens, masks, eod)
    inputs, prefix_ends = batch["tokens"], prefix_ends[:, :-1]
    places = torch.arange(inputs.size(1), device=tokens.device)
    span, weights = batch.get("attention_span"), batch["loss_mask"]
    first = torch.zeros_like(inputs) if span is None else span[..., 0]
    if objective.targets_only:
        weights = weights * (places + 1 >= prefix_ends)
    if objective.reweights:
        weights = weights * position_weights(inputs.size(1)).to(weights)
    seen = torch.stack([first, torch.maximum(places + 1, prefix_ends)], -1)
    return batch | {"loss_mask": weights, "attention_span": seen}
