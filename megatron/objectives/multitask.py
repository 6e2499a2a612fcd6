"""Multitask finetuning: targets from their inputs, as T0 was finetuned (arXiv:2110.08207)."""

from functools import partial

import torch
from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.objectives.gpt import GPT, PACKED, SPAN_FIELDS
from megatron.objectives.objective import Collate
from megatron.objectives.packed_texts import packed_batch
from megatron.tensor_parallel.broadcast import Batch


@OBJECTIVES.register("multitask")
class Multitask(GPT):
    """Next-token prediction of targets; each sample holds several pairs."""

    name: ObjectiveName = "multitask"
    fields = SPAN_FIELDS

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `pair_batch` for these masks."""
        return partial(pair_batch, masks=masks, eod=eod, objective=plan)


def pair_batch(
    tokens: Tensor,
    text_ids: Tensor,
    target_starts: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> Batch:
    """Return a batch for multitask finetuning, of samples of an MTFDataset.

    No token sees another pair; a token counts when it is a target, predicted within its pair.

    Shapes: tokens, text_ids, target_starts [b, s + 1] -> SPAN_FIELDS.
    """
    places = torch.arange(1, tokens.size(1), device=tokens.device)
    return packed_batch(
        tokens,
        text_ids,
        (text_ids[:, 1:] > 0) & (places >= target_starts[:, 1:]),
        masks,
        eod,
        objective,
        # An input without a target may end with the row, which is one token longer.
        seen=target_starts[:, :-1].clamp(max=len(places)) if objective.sees_prefix else None,
    )
