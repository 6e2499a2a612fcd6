"""Batches of several texts in a sample that do not see each other."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.objectives.gpt import gpt_batch
from megatron.tensor_parallel.broadcast import Batch


def packed_batch(
    tokens: Tensor,
    text_ids: Tensor,
    is_target: Tensor,
    masks: MaskPlan,
    eod: int | None,
    objective: ObjectivePlan,
    seen: Tensor | None = None,
) -> Batch:
    """Return a batch of texts that do not see each other.

    Args:
        text_ids: number of each token's text, 0 for padding.
        is_target: whether each label counts, if it is predicted within its text.
        seen: up to where each token sees at least; only what is before it if None.

    Shapes: tokens, text_ids [b, s + 1]; is_target, seen [b, s] -> SPAN_FIELDS.
    """
    batch = gpt_batch(tokens, replace(masks, reset_positions=False, isolate_documents=False), eod)
    places, weights = batch["positions"], batch["loss_mask"]
    begins = text_ids[:, :-1].diff(dim=1, prepend=text_ids[:, :1]) != 0
    starts = torch.where(begins, places, 0).cummax(1).values
    stops = places + 1
    if seen is not None:
        stops = torch.maximum(stops, seen)
    weights = weights * (is_target & (text_ids[:, 1:] == text_ids[:, :-1]))
    if objective.equal_targets:
        counts = torch.zeros(weights.size(0), tokens.size(1) + 1, device=tokens.device)
        counts.scatter_add_(1, text_ids[:, 1:], weights)
        weights = weights / counts.gather(1, text_ids[:, 1:]).clamp(min=1)
    return batch | {
        "positions": places - starts if masks.reset_positions else places,
        "loss_mask": weights,
        "attention_span": torch.stack([starts, stops], -1),
    }
