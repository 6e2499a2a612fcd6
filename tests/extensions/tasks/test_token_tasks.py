"""Token classification and question answering: batches, losses, heads, recorded predictions."""

import pytest
import torch
import torch.nn.functional as F
from networks import task_network
from tiny import tiny_plan

from megatron.config.plan.plan import Plan
from megatron.extensions.tasks.objective_tokens import (
    ANSWER_FIELDS,
    TAGGING_FIELDS,
    QuestionAnswering,
    TokenClassification,
    answer_batch,
    tagging_batch,
)

OBJECTIVES = {
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
}
LABELS = ("O", "B-PER", "B-LOC")
B, S = 3, 8


def plan_of(task, *flags) -> Plan:
    labels = (
        ("--labels", *LABELS) if task == "token-classification" else ("--max-query-length", "2")
    )
    words = ("--task", task, "--train-data", "a", *labels, "--seq-length", str(S), *flags)
    return tiny_plan(*words, without=("--data-path",), objective=task)


def batch_of(task, weight=(1.0, 1.0, 1.0)):
    inputs = {
        "text": torch.randint(1, 11, (B, S)),
        "types": torch.zeros(B, S, dtype=torch.int64),
        "padding_mask": torch.ones(B, S, dtype=torch.int64),
        "uid": torch.arange(B),
        "weight": torch.tensor(weight),
        "index": torch.tensor([7, 3, 5]),
    }
    if task == "question-answering":
        positions = torch.randint(0, S, (2, B))
        return answer_batch(start_positions=positions[0], end_positions=positions[1], **inputs)
    return tagging_batch(
        labels=torch.randint(0, 3, (B, S)),
        loss_mask=torch.tensor([0.0, *[1.0] * (S - 2), 2.0]).repeat(B, 1),
        first=torch.ones(B, S),
        **inputs,
    )


def loss_of(objective, group):
    return objective.loss(plan_of(objective.name).objective)(group)


@pytest.mark.parametrize(
    ("task", "fields", "outputs"),
    [("token-classification", TAGGING_FIELDS, 3), ("question-answering", ANSWER_FIELDS, 2)],
)
def test_the_head_has_logits_for_each_token(task, fields, outputs, group):
    assert {*batch_of(task)} == {*fields}
    for layers in ("1", "3"):
        model = task_network(plan_of(task, "--head-layers", layers), group)
        spec = plan_of(task, "--head-layers", layers).model
        assert model(batch_of(task)).shape == (B, S, outputs)
        assert sum(p.numel() for p in model.parameters()) == spec.num_parameters


def test_layers_and_dropout_of_the_heads():
    heads = [(m.head_layers, m.head_dropout) for m in (plan_of(t).model.head for t in OBJECTIVES)]
    assert heads == [(2, 0.5), (1, 0.0)]


def test_the_loss_of_labels_is_the_weighted_mean_over_tokens(group):
    batch, logits = batch_of("token-classification"), torch.randn(B, S, 3)
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    expected = (losses * mask).sum() / mask.sum()
    loss = loss_of(TokenClassification(), group)
    torch.testing.assert_close(loss(logits, batch), expected)
    # Samples that only fill up a batch do not count, and the others weigh more.
    batch["weight"] = torch.tensor([1.5, 1.5, 0.0])
    shorter = {name: value[:2] for name, value in batch.items()}
    shorter["weight"] = torch.ones(2)
    torch.testing.assert_close(loss(logits, batch), loss(logits[:2], shorter))
    batch["weight"] = torch.zeros(B)
    assert loss(logits, batch) == 0


def test_the_loss_of_answers_is_the_mean_of_starts_and_ends(group):
    batch, logits = batch_of("question-answering"), torch.randn(B, S, 2)
    starts = F.cross_entropy(logits[..., 0], batch["start_positions"])
    ends = F.cross_entropy(logits[..., 1], batch["end_positions"])
    loss = loss_of(QuestionAnswering(), group)
    torch.testing.assert_close(loss(logits, batch), (starts + ends) / 2)


def test_predictions_are_recorded_without_what_fills_up_a_batch(group):
    for objective in (TokenClassification(), QuestionAnswering()):
        batch = batch_of(objective.name, weight=(1.0, 0.0, 1.0))
        logits = torch.randn(B, S, 3 if objective.name == "token-classification" else 2)
        loss = loss_of(objective, group)
        objective.predictions.start()
        with torch.no_grad():
            loss(logits, batch)
        rows = dict(objective.predictions.stop())
        assert {*rows} == {7, 5}
        values = logits if objective.name == "question-answering" else logits.argmax(-1)
        torch.testing.assert_close(torch.tensor(rows[5]), values[2])
