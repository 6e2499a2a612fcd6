"""Supervised finetuning: the answers of conversations, each from what is before it."""

from functools import partial

from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.objectives.gpt import GPT, PACKED, SPAN_FIELDS
from megatron.objectives.objective import Collate
from megatron.objectives.packed_texts import packed_batch
from megatron.tensor_parallel.broadcast import Batch


@OBJECTIVES.register("sft")
class SFT(GPT):
    """Next-token prediction of answers; each sample holds several conversations."""

    name: ObjectiveName = "sft"
    fields = SPAN_FIELDS

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `chat_batch` for these masks."""
        return partial(chat_batch, masks=masks, eod=eod, objective=plan)


def chat_batch(
    tokens: Tensor,
    text_ids: Tensor,
    is_target: Tensor,
    masks: MaskPlan = PACKED,
    eod: int | None = None,
    *,
    objective: ObjectivePlan,
) -> Batch:
    """Return a batch for supervised finetuning, of samples of a ChatDataset.

    No token sees another conversation; a token counts when it is of an answer.

    Shapes: tokens, text_ids, is_target [b, s + 1] -> SPAN_FIELDS.
    """
    return packed_batch(tokens, text_ids, is_target[:, 1:] > 0, masks, eod, objective)
