"""Objectives: the fields of their batches, how samples become batches, and the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective_plan import ObjectiveName, ObjectivePlan
from megatron.model.loss import Loss, next_token_loss, num_expected_targets
from megatron.tensor_parallel.broadcast import Fields
from megatron.training.loop.batch import (
    CAUSAL_FIELDS,
    SPAN_FIELDS,
    Collate,
    chat_batch,
    gpt_batch,
    pair_batch,
    prefix_batch,
)


@dataclass(frozen=True)
class Objective:
    """An objective of a GPT.

    Args:
        name: by which plan and data know it; the samples follow from it.
        fields: returns the fields of a batch.
        collate: returns what makes a batch of samples.
        loss: returns what makes the loss, given the tensor-parallel group and the kernels.
    """

    name: ObjectiveName
    fields: Callable[[MaskPlan], Fields]
    collate: Callable[[ObjectivePlan, MaskPlan, int | None], Collate]
    loss: Callable[[ObjectivePlan], Callable[..., Loss]]


def _prefix_loss(plan: ObjectivePlan) -> Callable[..., Loss]:
    expected = partial(
        num_expected_targets, targets_only=plan.targets_only, reweights=plan.reweights
    )
    return partial(next_token_loss, num_expected=expected)


GPT = Objective(
    "gpt",
    fields=lambda masks: SPAN_FIELDS if masks.isolate_documents else CAUSAL_FIELDS,
    collate=lambda plan, masks, eod: partial(gpt_batch, masks=masks, eod=eod),
    loss=lambda plan: next_token_loss,
)
"""The next token, from all before it."""

PREFIX_LM = Objective(
    "prefix-lm",
    fields=lambda masks: SPAN_FIELDS,
    collate=lambda plan, masks, eod: partial(prefix_batch, masks=masks, eod=eod, objective=plan),
    loss=_prefix_loss,
)
"""The next token, from all before it and all of a prefix of random length (arXiv:1910.10683)."""

MULTITASK = Objective(
    "multitask",
    fields=lambda masks: SPAN_FIELDS,
    collate=lambda plan, masks, eod: partial(pair_batch, masks=masks, eod=eod, objective=plan),
    loss=lambda plan: next_token_loss,
)
"""Targets from their inputs, as T0 was finetuned (arXiv:2110.08207)."""

SFT = Objective(
    "sft",
    fields=lambda masks: SPAN_FIELDS,
    collate=lambda plan, masks, eod: partial(chat_batch, masks=masks, eod=eod, objective=plan),
    loss=lambda plan: next_token_loss,
)
"""The answers of conversations, from what is before each."""

OBJECTIVES: dict[ObjectiveName, Objective] = {o.name: o for o in (GPT, PREFIX_LM, MULTITASK, SFT)}
