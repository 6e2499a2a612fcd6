"""Classification, regression and multiple choice: the loss of a head on a token of BERT or GPT."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.data.datasets.run_datasets import DataRequest, Datasets
from megatron.extensions.tasks.datasets import LabelledDatasets, task_datasets
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.loss import Loss, Losses
from megatron.objectives.objective import Collate, Objective
from megatron.objectives.predictions import Predictions
from megatron.tensor_parallel.broadcast import Batch, Field, Fields
from megatron.tokenizer.types.tokenizer import Tokenizer

CLASSIFICATION_FIELDS: Fields = {
    "tokens": Field("bs"),
    "token_types": Field("bs"),
    "positions": Field("bs"),
    "attention_span": Field("b12"),
    "label": Field("b", torch.float32),
    "label_weight": Field("b", torch.float32),
    "weight": Field("b", torch.float32),
    "index": Field("b"),
}
"""A batch in which each token sees the real tokens of its text; `index` is the sample's number."""

CHOICE_FIELDS: Fields = {
    **CLASSIFICATION_FIELDS,
    "tokens": Field("b4s"),
    "token_types": Field("b4s"),
    "positions": Field("b4s"),
    "attention_span": Field("b42"),
}
"""A batch of questions with a row for each of their choices."""


_DECODED = ("tokens", "positions", "label", "label_weight", "weight", "index")

SCORE_FIELDS: Fields = {
    **{name: CLASSIFICATION_FIELDS[name] for name in _DECODED},
    "last": Field("b"),
}
"""A batch of a GPT, for which attention is causal; `last` is the position of a text's last token."""

CHOICE_SCORE_FIELDS: Fields = {
    **{name: CHOICE_FIELDS[name] for name in _DECODED},
    "last": Field("b4"),
}
"""A batch of questions of a GPT with a row for each of their choices."""


@OBJECTIVES.register("classification")
class Classification(Objective):
    """Cross-entropy of the class of a text or a pair of texts; of a single output squared error.

    Its samples are not cut from token files; `predictions` records the logits of evaluations.
    """

    name: ObjectiveName = "classification"
    token_fields = ("text",)
    fields = CLASSIFICATION_FIELDS

    predictions: Predictions

    def __init__(self) -> None:
        self.predictions = Predictions()

    def datasets(self, request: DataRequest, tokenizer: Tokenizer) -> Datasets:
        """Return the labelled texts of a task; samples of each epoch are shuffled."""
        return task_datasets(request, tokenizer)

    def initial_weights(self, plan: ObjectivePlan) -> str:
        """Return --pretrained-checkpoint."""
        return str(plan.own.pretrained)

    def epochs(
        self, run: Any, *, sets: Datasets, batches: Callable[..., Iterator[Batch]]
    ) -> Any | None:
        """Return the evaluation of labelled files after each epoch."""
        if not isinstance(sets, LabelledDatasets):
            return None
        # Imports a run, which an objective alone does not need.
        from megatron.extensions.tasks.evaluation import TaskEvaluation, TaskSets

        return TaskEvaluation(
            run.engine,
            run.plan,
            run.config,
            run.groups,
            TaskSets(sets.task, sets.steps, sets.files, batches, self.predictions),
            journal=run.journal,
            tensorboard=run.tensorboard,
            after_call=run.watchdog.record_progress,
        )

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `labelled_batch`."""
        return labelled_batch

    def loss(self, plan: ObjectivePlan) -> Callable[..., Loss]:
        """Return the builder of the loss, which also records predictions."""
        return loss_builder(lambda ranks: class_loss(self.predictions, sequence_group=ranks))


@OBJECTIVES.register("multiple-choice")
class MultipleChoice(Classification):
    """Cross-entropy of the right one of four choices, each of which is a row with one logit."""

    name: ObjectiveName = "multiple-choice"
    fields = CHOICE_FIELDS


@OBJECTIVES.register("gpt-classification")
class GPTClassification(Classification):
    """The loss of `Classification` of a GPT, with the logits of a text's last token."""

    name: ObjectiveName = "gpt-classification"
    fields = SCORE_FIELDS

    def collate(self, plan: ObjectivePlan, masks: MaskPlan, eod: int | None) -> Collate:
        """Return `scored_batch`."""
        return scored_batch

    def loss(self, plan: ObjectivePlan) -> Callable[..., Loss]:
        """Return the builder of the loss, which also records predictions."""
        row_loss = class_loss(self.predictions)

        def loss(logits_bsc: Tensor, batch: Batch) -> Tensor | Losses:
            last_b = batch["last"].flatten()
            rows_b = torch.arange(len(last_b), device=last_b.device)
            return row_loss(logits_bsc[rows_b, last_b], batch)

        return loss_builder(lambda ranks: loss)


@OBJECTIVES.register("gpt-multiple-choice")
class GPTMultipleChoice(GPTClassification):
    """The loss of `MultipleChoice` of a GPT."""

    name: ObjectiveName = "gpt-multiple-choice"
    fields = CHOICE_SCORE_FIELDS


def loss_builder(make: Callable[[dist.ProcessGroup | None], Loss]) -> Callable[..., Loss]:
    """Return the builder of a loss that does not depend on kernels, vocabulary or tensor ranks.

    Args:
        make: returns the loss; its argument are the ranks that have parts of the same sequences.
    """

    def build(
        group: dist.ProcessGroup,
        kernels: Kernels = REFERENCE,
        *,
        vocab_size: int | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> Loss:
        return make(sequence_group)

    return build


def labelled_batch(
    text: Tensor,
    types: Tensor,
    padding_mask: Tensor,
    label: Tensor,
    uid: Tensor,
    weight: Tensor,
    index: Tensor,
    label_weight: Tensor | None = None,
) -> Batch:
    """Return a batch of packed texts with their labels.

    Args:
        types: any value at padding.
        uid: number of the sample in its file; not used.
        weight: factor of a sample in the mean loss; 0 for padding of a batch.
        index: number of the sample in its data set.
        label_weight: weight of its label in the loss (default: 1).

    Shapes: text, types, padding_mask [b, s] or [b, n, s]; others [b] -> CLASSIFICATION_FIELDS or
        CHOICE_FIELDS.
    """
    lengths = padding_mask.sum(-1)
    span = torch.stack([torch.zeros_like(lengths), lengths], -1)
    return {
        "tokens": text,
        "token_types": types * padding_mask,
        "positions": torch.arange(text.size(-1)).expand_as(text).contiguous(),
        "attention_span": span if text.dim() == 3 else span[:, None],
        "label": label.float(),
        "label_weight": (torch.ones_like(weight) if label_weight is None else label_weight).float(),
        "weight": weight.float(),
        "index": index,
    }


def scored_batch(**inputs: Tensor) -> Batch:
    """Return a batch of a GPT; arguments as in `labelled_batch`.

    Shapes: as in `labelled_batch` -> SCORE_FIELDS or CHOICE_SCORE_FIELDS.
    """
    batch = labelled_batch(**inputs)
    last = inputs["padding_mask"].sum(-1) - 1
    return {name: batch[name] for name in _DECODED} | {"last": last}


def class_loss(
    predictions: Predictions, *, sequence_group: dist.ProcessGroup | None = None
) -> Loss:
    """Return the mean cross-entropy of labels; of networks with one output the mean squared error.

    Logits of the choices of a question are put in one row first. Samples of a micro-batch are
    weighed by their labels.

    Args:
        predictions: records the logits of evaluations.
        sequence_group: ranks that have parts of the same sequences; the mean of their results is
            the loss, and the first of them has the first tokens.

    Shapes: logits [b, C] or [b * n, 1], label, label_weight, weight [b] -> scalar float32.
    """
    parts = sequence_group.size() if sequence_group else 1
    is_first = parts == 1 or sequence_group.rank() == 0  # type: ignore[union-attr]

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        labels_b, weights_b = batch["label"], batch["weight"]
        logits_bc = logits.float().view(len(labels_b), -1)
        if is_first and not torch.is_grad_enabled():
            predictions.add(logits_bc, batch)
        if logits_bc.size(1) == 1:
            losses_b = (logits_bc[:, 0] - labels_b) ** 2
        else:
            losses_b = F.cross_entropy(logits_bc, labels_b.long(), reduction="none")
        scale_b = batch["label_weight"] / _mean(batch["label_weight"], weights_b > 0)
        return (losses_b * weights_b * scale_b).mean() * (parts if is_first else 0)

    return loss


def _mean(values_b: Tensor, counts_b: Tensor) -> Tensor:
    """Return the mean of the values that count; 1 if none does."""
    total = (values_b * counts_b).sum() + ~counts_b.any()
    return total / counts_b.sum().clamp(min=1)
