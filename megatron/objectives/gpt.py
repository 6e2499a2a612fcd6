"""GPT: next-token prediction from all previous tokens, or only from the same document's."""

from functools import partial

import torch
from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.data.datasets.random_tokens import random_datasets
from megatron.data.datasets.run_datasets import DataRequest, Datasets
from megatron.objectives.objective import Collate, Objective
from megatron.tensor_parallel.broadcast import Batch, Field, Fields
from megatron.tokenizer.types.tokenizer import Tokenizer

PACKED = MaskPlan(reset_positions=False, isolate_documents=False, mask_loss=False)
"""Documents of a sample see each other, as in Megatron-LM by default."""

CAUSAL_FIELDS: Fields = {
    "tokens": Field("bs"),
    "positions": Field("bs"),
    "labels": Field("bs"),
    "loss_mask": Field("bs", torch.float32),
}
"""A batch for which attention is causal."""

SPAN_FIELDS: Fields = {**CAUSAL_FIELDS, "attention_span": Field("bS2")}
"""A batch that says what each token sees; attention is over all positions, on every rank."""


@OBJECTIVES.register("gpt")
class GPT(Objective):
    """Next-token prediction; with --fim-rate on documents rearranged for fill-in-the-middle."""

    name: ObjectiveName = "gpt"
    fields = CAUSAL_FIELDS

    def datasets(self, request: DataRequest, tokenizer: Tokenizer) -> Datasets | None:
        """Return samples of random tokens if the plan has these; None: cut from token files."""
        return random_datasets(request) if request.data.is_random else None

    def batch_fields(self, masks: MaskPlan) -> Fields:
        """Return `fields`, or the fields of batches whose documents do not see each other."""
        return SPAN_FIELDS if masks.isolate_documents else self.fields

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `gpt_batch` for these masks."""
        return partial(gpt_batch, masks=masks, eod=eod)


def gpt_batch(tokens: Tensor, masks: MaskPlan = PACKED, eod: int | None = None) -> Batch:
    """Return a batch for next-token prediction.

    Args:
        masks: how documents are kept apart.
        eod: the token that ends a document; needed when they are.

    Shapes: tokens [b, s + 1] -> CAUSAL_FIELDS, or SPAN_FIELDS if documents are isolated.
    """
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.size(1), device=tokens.device).expand_as(inputs).contiguous()
    loss_mask = torch.ones(labels.shape, dtype=torch.float32, device=tokens.device)
    batch = {"tokens": inputs, "positions": positions, "labels": labels, "loss_mask": loss_mask}
    if not masks.needs_eod:
        return batch
    if eod is None:
        raise ValueError("documents can be kept apart only when the token that ends one is known")
    ends = inputs.eq(eod)
    if masks.mask_loss:
        batch["loss_mask"] = loss_mask.masked_fill(ends, 0.0)
    # An end belongs to the document that it ends: the next one starts after it.
    starts = torch.where(ends.roll(1, 1), positions, 0).cummax(1).values
    if masks.reset_positions:
        batch["positions"] = positions - starts
    if masks.isolate_documents:
        batch["attention_span"] = torch.stack([starts, positions + 1], -1)
    return batch
