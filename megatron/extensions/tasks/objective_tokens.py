"""Token classification and extractive question answering: losses of a head on every token."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.extensions.tasks.objective import (
    CLASSIFICATION_FIELDS,
    Classification,
    labelled_batch,
    loss_builder,
)
from megatron.model.loss import Loss
from megatron.objectives.objective import Collate
from megatron.objectives.predictions import Predictions
from megatron.tensor_parallel.broadcast import Batch, Field, Fields

_INPUTS = {
    name: field
    for name, field in CLASSIFICATION_FIELDS.items()
    if name not in ("label", "label_weight")
}

TAGGING_FIELDS: Fields = _INPUTS | {"labels": Field("bs"), "loss_mask": Field("bs", torch.float32)}
"""A batch of sentences with a label for each token, and its weight in the loss."""

ANSWER_FIELDS: Fields = _INPUTS | {"start_positions": Field("b"), "end_positions": Field("b")}
"""A batch of questions with their contexts, and the first and last token of each answer."""


@OBJECTIVES.register("token-classification")
class TokenClassification(Classification):
    """Cross-entropy of the label of each token; `predictions` records the likeliest labels."""

    name: ObjectiveName = "token-classification"
    fields = TAGGING_FIELDS

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `tagging_batch`."""
        return tagging_batch

    def loss(self, plan: ObjectivePlan) -> Callable[..., Loss]:
        """Return the builder of the loss, which also records predictions."""
        return _builder(self.predictions, _tagging_loss)


@OBJECTIVES.register("question-answering")
class QuestionAnswering(Classification):
    """Cross-entropy of the first and the last token of an answer, over all tokens of a sample."""

    name: ObjectiveName = "question-answering"
    fields = ANSWER_FIELDS

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `answer_batch`."""
        return answer_batch

    def loss(self, plan: ObjectivePlan) -> Callable[..., Loss]:
        """Return the builder of the loss, which also records predictions."""
        return _builder(self.predictions, _answer_loss)


def _builder(
    predictions: Predictions, loss: Callable[[Tensor, Batch, Predictions | None], Tensor]
) -> Callable[..., Loss]:
    def of_batch(logits_bsc: Tensor, batch: Batch) -> Tensor:
        return loss(logits_bsc.float(), batch, None if torch.is_grad_enabled() else predictions)

    return loss_builder(lambda ranks: of_batch)


def _tagging_loss(logits_bsc: Tensor, batch: Batch, predictions: Predictions | None) -> Tensor:
    """Return the mean cross-entropy of the tokens of real samples, by their weights.

    Shapes: logits_bsc [b, s, C], labels, loss_mask [b, s], weight [b] -> scalar.
    """
    if predictions:
        predictions.add(logits_bsc.argmax(-1), batch)
    weight_b = batch["weight"]
    losses_bs = F.cross_entropy(logits_bsc.transpose(1, 2), batch["labels"], reduction="none")
    mask_bs = batch["loss_mask"] * (weight_b > 0)[:, None]
    # Where nothing counts the loss is 0, not 0 / 0.
    mean = (losses_bs * mask_bs).sum() / mask_bs.sum().clamp(min=torch.finfo(mask_bs.dtype).tiny)
    return mean * weight_b.mean()


def _answer_loss(logits_bsc: Tensor, batch: Batch, predictions: Predictions | None) -> Tensor:
    """Return the mean of the cross-entropies of first and last tokens.

    Shapes: logits_bsc [b, s, 2], start_positions, end_positions, weight [b] -> scalar.
    """
    if predictions:
        predictions.add(logits_bsc, batch)
    losses_b = sum(
        F.cross_entropy(logits_bsc[..., column], batch[name], reduction="none")
        for column, name in enumerate(("start_positions", "end_positions"))
    )
    return (losses_b * batch["weight"]).mean() / 2


def tagging_batch(labels: Tensor, loss_mask: Tensor, first: Tensor, **inputs: Tensor) -> Batch:
    """Return a batch of sentences of a TaggingDataset.

    Args:
        first: whether a token is the first of a word; not used.
        inputs: those of `labelled_batch`, without a label of the sample.

    Shapes: labels, loss_mask, first [b, s] -> TAGGING_FIELDS.
    """
    return _inputs(inputs) | {"labels": labels, "loss_mask": loss_mask.float()}


def answer_batch(start_positions: Tensor, end_positions: Tensor, **inputs: Tensor) -> Batch:
    """Return a batch of questions with their contexts.

    Args:
        inputs: those of `labelled_batch`, without a label of the sample.

    Shapes: start_positions, end_positions [b] -> ANSWER_FIELDS.
    """
    return _inputs(inputs) | {"start_positions": start_positions, "end_positions": end_positions}


def _inputs(inputs: dict[str, Any]) -> Batch:
    batch = labelled_batch(**inputs, label=inputs["uid"])
    return {name: batch[name] for name in _INPUTS}
