"""Terms of a loss: means over the micro-batches of a step."""

import pytest
import torch
from problems import problem

from megatron.engine.loss_terms import LossTerms
from megatron.model.loss import Losses


def terms_of(output, batch):
    return Losses(output.sum(), {"lm loss": output[0], "sop loss": output[1]})


@pytest.mark.usefixtures("group")
def test_terms_are_means_since_the_last_call():
    loss = LossTerms(terms_of, ["lm loss", "sop loss"])
    output = torch.tensor([1.0, 0.5], requires_grad=True)
    total = loss(output, {})
    total.backward()
    assert (total.item(), output.grad.tolist()) == (1.5, [1.0, 1.0])
    loss(torch.tensor([3.0, 0.0]), {})
    assert loss.take(torch.device("cpu")) == {"lm loss": 2.0, "sop loss": 0.25}
    loss(torch.tensor([5.0, 1.0]), {})
    assert loss.take(torch.device("cpu")) == {"lm loss": 5.0, "sop loss": 1.0}


def test_a_loss_of_one_number_has_no_terms():
    loss = LossTerms(lambda output, batch: output.sum())
    assert loss(torch.ones(2), {}).item() == 2
    assert loss.take(torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("loss", "names", "message"),
    [
        (terms_of, [], "lm loss, sop loss … loss_terms() names no"),
        (terms_of, ["lm loss"], "lm loss, sop loss … loss_terms() … lm loss"),
        (lambda output, batch: output.sum(), ["z"], "no terms … loss_terms() … z"),
        (lambda output, batch: output, [], "[2] … scalar"),
    ],
)
def test_a_loss_that_differs_from_its_declaration_is_refused(loss, names, message):
    with problem(message):
        LossTerms(loss, names)(torch.ones(2), {})
