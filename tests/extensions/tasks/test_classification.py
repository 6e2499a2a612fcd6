"""Classification, regression and multiple choice: batches, loss, head, recorded predictions."""

import pytest
import torch
import torch.nn.functional as F
from networks import task_network
from tiny import tiny_plan

from megatron.common.registry import OBJECTIVES
from megatron.extensions.bert.layers import bert_layers
from megatron.extensions.tasks.data.tasks import TASKS
from megatron.extensions.tasks.data.text_flags import TEXT_TASKS
from megatron.extensions.tasks.flags import Task, is_finetuned, objective_of
from megatron.extensions.tasks.objective import (
    class_loss,
    labelled_batch,
    scored_batch,
)
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.layers.attention_kernels import attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.objectives.predictions import Predictions
from megatron.tensor_parallel.rng import OrdinaryStream

NAMES = [name for name in Task.__args__ if is_finetuned(name) and name not in TEXT_TASKS]


def plan_of(task, *flags, architecture="bert"):
    words = ("--task", task, "--train-data", "a", "--hidden-dropout", "0", *flags)
    objective = objective_of(task, causal=architecture == "gpt")
    return tiny_plan(*words, without=("--data-path",), objective=objective)


def spec_of(task, *flags, architecture="bert"):
    return plan_of(task, *flags, architecture=architecture).model


def model_of(group, task, *flags, architecture="bert"):
    return task_network(plan_of(task, *flags, architecture=architecture), group)


def inputs_of(*shape, label=(0, 1), weight=(1, 1)):
    length = torch.full(shape[:-1], 4)
    return {
        "text": torch.randint(1, 11, shape),
        "types": torch.zeros(shape, dtype=torch.int64),
        "padding_mask": (torch.arange(shape[-1]) < length[..., None]).long(),
        "label": torch.tensor(label),
        "uid": torch.arange(shape[0]),
        "weight": torch.tensor(weight),
        "index": torch.tensor([7, 3]),
    }


def batch_of(*shape, **others):
    return labelled_batch(**inputs_of(*shape, **others))


def test_the_tasks_of_flags_and_of_readers_are_the_same():
    assert {*NAMES} == {*TASKS}


@pytest.mark.parametrize("architecture", ["bert", "gpt"])
@pytest.mark.parametrize("name", NAMES)
def test_the_network_has_the_outputs_of_the_task(name, architecture, group):
    task, spec = TASKS[name], spec_of(name, architecture=architecture)
    assert (spec.head.num_outputs, spec.head.num_choices) == (
        task.num_outputs,
        task.num_choices or 1,
    )
    model = model_of(group, name, architecture=architecture)
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters


def test_pooler_and_encoder_have_the_names_of_a_pretrained_bert(group):
    spec = tiny_plan(objective="bert").model
    bert = SequentialModel(
        bert_layers(
            spec,
            LayerParts(
                group=group,
                rng=OrdinaryStream(),
                mixed=False,
                core_attention=lambda number: attention_of(spec, REFERENCE),
                batch_fields=(),
            ),
        )
    )
    theirs = {name: p.shape for name, p in bert.named_parameters()}
    own = {name: p.shape for name, p in model_of(group, "MNLI").named_parameters()}
    head = {name: shape for name, shape in own.items() if "classification_head" in name}
    assert own.items() - head.items() <= theirs.items()
    assert {*head.values()} == {(3, 8), (3,)}


def test_a_gpt_reads_the_logits_of_the_last_token(group):
    for task, shape in (("MNLI", (2, 6)), ("RACE", (2, 4, 6))):
        model = model_of(group, task, architecture="gpt").eval()
        batch = scored_batch(**inputs_of(*shape))
        logits = model(batch)
        changed = batch | {"tokens": batch["tokens"].clone()}
        changed["tokens"][..., 4:] = 0
        predictions = Predictions()
        plan = tiny_plan().objective
        loss = OBJECTIVES.get(objective_of(task, causal=True))().loss(plan)(group)
        assert torch.equal(loss(model(changed), batch), loss(logits, batch))
        # Tokens behind the end of the text differ, and are not read.
        assert not torch.equal(model(changed), logits)
        expected = class_loss(predictions)(logits[:, 3], batch)
        assert torch.equal(loss(logits, batch), expected)


def test_padding_changes_no_logits(group):
    model = model_of(group, "MNLI").eval()
    batch = batch_of(2, 6)
    changed = batch | {"tokens": batch["tokens"].clone()}
    changed["tokens"][:, 4:] = 0
    assert torch.equal(model(batch), model(changed))


def test_the_choices_of_a_question_are_rows_of_their_own(group):
    model = model_of(group, "RACE").eval()
    batch = batch_of(2, 4, 6)
    logits = model(batch)
    assert logits.shape == (8, 1)
    one = {name: batch[name][1:, 2:3] for name in ("tokens", "token_types", "positions")}
    alone = model({**one, "attention_span": batch["attention_span"][1:, 2:3]})
    torch.testing.assert_close(alone[0], logits[6])
    loss = class_loss(Predictions())(logits, batch)
    torch.testing.assert_close(loss, F.cross_entropy(logits.view(2, 4), torch.tensor([0, 1])))


def test_the_loss_is_a_weighted_mean():
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.3, -1.0, 2.0]])
    loss = class_loss(Predictions())
    full = F.cross_entropy(logits, torch.tensor([0, 1]), reduction="none")
    torch.testing.assert_close(loss(logits, batch_of(2, 6)), full.mean())
    # Of a smaller last batch the second row is padding.
    last = batch_of(2, 6, weight=(2, 0))
    torch.testing.assert_close(loss(logits, last), full[0])


def test_samples_weigh_as_their_labels_do():
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.3, -1.0, 2.0], [1.0, 1.0, 1.0]])
    weights, labels = torch.tensor([0.5, 1.0, 3.0]), torch.tensor([2, 1, 0])
    batch = {"label": labels.float(), "label_weight": weights[labels], "weight": torch.ones(3)}
    loss = class_loss(Predictions())
    torch.testing.assert_close(loss(logits, batch), F.cross_entropy(logits, labels, weights))
    # Of a smaller last batch the third row is padding.
    batch["weight"] = torch.tensor([1.5, 1.5, 0.0])
    torch.testing.assert_close(
        loss(logits, batch), F.cross_entropy(logits[:2], labels[:2], weights)
    )
    batch["weight"] = torch.zeros(3)
    assert loss(logits, batch) == 0


def test_layers_on_the_first_token_in_place_of_a_pooler(group):
    flags = ("--labels", "a", "b", "c", "--head-layers", "2", "--head-dropout", "0")
    model = model_of(group, "text-classification", *flags).eval()
    spec = spec_of("text-classification", *flags)
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters
    names = {name.split(".", 1)[1] for name, _ in model.named_parameters() if "head" in name}
    assert names == {
        f"classification_head.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    }
    assert not any("pooler" in name for name, _ in model.named_parameters())
    head, x_bsh = [*model.children()][-1], torch.randn(2, 6, 8)
    first, last = head.classification_head
    expected = last(F.relu(first(x_bsh[:, 0])))
    torch.testing.assert_close(head(x_bsh), expected)


def test_a_single_output_is_a_regression():
    logits = torch.tensor([[1.0], [4.5]])
    loss = class_loss(Predictions())(logits, batch_of(2, 6, label=(0.0, 5.0)))
    torch.testing.assert_close(loss, torch.tensor((1.0 + 0.25) / 2))


def test_predictions_are_recorded_in_evaluations_that_are_recorded_alone():
    predictions = Predictions()
    loss, batch = class_loss(predictions), batch_of(2, 6, weight=(1, 0))
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with torch.no_grad():
        loss(logits, batch)
    predictions.start()
    loss(logits.requires_grad_(), batch)
    assert predictions.stop() == []
    predictions.start()
    with torch.no_grad():
        loss(logits, batch)
    assert predictions.stop() == [(7, [1.0, 2.0])]
    assert predictions.stop() == []


def test_the_dropout_of_the_head_is_that_of_hidden_layers(group):
    torch.manual_seed(0)
    model = model_of(group, "MNLI", "--hidden-dropout", "0.5", "--attention-dropout", "0")
    batch = batch_of(2, 6)
    pooled = model.get_submodule("7")
    x_bsh = torch.ones(2, 6, 8)
    assert not torch.equal(pooled(x_bsh), pooled(x_bsh))
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
