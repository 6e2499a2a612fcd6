"""A token has one weight in a global batch, however its micro-batches are cut."""

import pytest
import torch
from torch.testing import assert_close

from megatron.engine.token_counts import TokenCounts
from megatron.model.loss import next_token_loss


@pytest.fixture
def uneven(micro_batch):
    """Two micro-batches, of which one has a single token that counts."""
    first, second = micro_batch(0), micro_batch(1)
    second["loss_mask"] = torch.zeros_like(second["loss_mask"])
    second["loss_mask"][0, 2] = 1.0
    return [first, second]


def token_losses(group, model, batch):
    """Return the sum of the losses of the tokens that count."""
    return next_token_loss(group)(model(batch), batch) * batch["loss_mask"].sum()


def test_a_step_takes_the_mean_over_all_tokens(build, alone, plain_model, group, uneven):
    flags = ("--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0", "--clip-grad", "0")
    engine = build(*flags, "--global-batch-size", "4", counts=TokenCounts(alone.data_and_sequence))
    total = sum(batch["loss_mask"].sum() for batch in uneven)
    expected = sum(token_losses(group, plain_model, batch) for batch in uneven) / total
    expected.backward()
    assert_close(engine.evaluate(iter(uneven), 2), expected.detach())
    assert_close(engine.train_batch(iter(uneven)), expected.detach())
    for name, parameter in plain_model.named_parameters():
        moved = parameter.detach() - 0.1 * parameter.grad
        assert_close(engine.module.get_parameter(name).detach(), moved)


def test_a_step_without_tokens_has_no_loss(alone, uneven):
    counts = TokenCounts(alone.data_and_sequence)
    for batch in uneven:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    assert len([*counts.read(iter(uneven), 2)]) == 2
    assert counts.mean() == 0.5


def test_no_more_is_read_than_a_step_takes(alone, uneven):
    batches = iter([*uneven, "the next step's"])
    assert len([*TokenCounts(alone.data_and_sequence).read(batches, 2)]) == 2
    assert next(batches) == "the next step's"


def test_tokens_are_counted_before_the_loss_is_computed(alone):
    with pytest.raises(ValueError, match="while its batches are read"):
        TokenCounts(alone.data_and_sequence).mean()
