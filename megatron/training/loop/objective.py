"""What is trained: which numbers a sample has, what the engine gets of them, and which loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megatron.config.data.mask_plan import MaskPlan
from megatron.config.data.objective_plan import ObjectiveName, ObjectivePlan
from megatron.engine.engine import MicroBatch
from megatron.model.loss import Loss, next_token_loss, num_expected_targets
from megatron.training.loop.batch import (
    chat_micro_batch,
    gpt_micro_batch,
    pair_micro_batch,
    prefix_micro_batch,
)

AsMicroBatch = Callable[[Tensor], MicroBatch]


@dataclass(frozen=True)
class Objective:
    """An objective of a GPT.

    Args:
        name: by which plan and data know it; the samples follow from it.
        channels: of a sample; see `read_batches`.
        as_micro_batch: returns what makes of samples what the engine takes.
        loss: returns what makes the loss, given the tensor-parallel group and the kernels.
    """

    name: ObjectiveName
    channels: tuple[int, ...]
    as_micro_batch: Callable[[ObjectivePlan, MaskPlan, int | None], AsMicroBatch]
    loss: Callable[[ObjectivePlan], Callable[..., Loss]]


def _prefix_loss(plan: ObjectivePlan) -> Callable[..., Loss]:
    expected = partial(
        num_expected_targets, targets_only=plan.targets_only, reweights=plan.reweights
    )
    return partial(next_token_loss, num_expected=expected)


GPT = Objective(
    "gpt",
    channels=(),
    as_micro_batch=lambda plan, masks, eod: partial(gpt_micro_batch, masks=masks, eod=eod),
    loss=lambda plan: next_token_loss,
)
"""The next token, from all before it."""

PREFIX_LM = Objective(
    "prefix-lm",
    channels=(2,),
    as_micro_batch=lambda plan, masks, eod: partial(
        prefix_micro_batch, masks=masks, eod=eod, objective=plan
    ),
    loss=_prefix_loss,
)
"""The next token, from all before it and all of a prefix of random length (arXiv:1910.10683)."""

MULTITASK = Objective(
    "multitask",
    channels=(3,),
    as_micro_batch=lambda plan, masks, eod: partial(
        pair_micro_batch, masks=masks, eod=eod, objective=plan
    ),
    loss=lambda plan: next_token_loss,
)
"""Targets from their inputs, as T0 was finetuned (arXiv:2110.08207)."""

SFT = Objective(
    "sft",
    channels=(3,),
    as_micro_batch=lambda plan, masks, eod: partial(
        chat_micro_batch, masks=masks, eod=eod, objective=plan
    ),
    loss=lambda plan: next_token_loss,
)
"""The answers of conversations, from what is before each."""

OBJECTIVES: dict[ObjectiveName, Objective] = {o.name: o for o in (GPT, PREFIX_LM, MULTITASK, SFT)}
