"""The loss against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model.loss import next_token_loss


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, requires_grad=True)
    return logits, torch.randint(7, (2, 5)), torch.tensor([[1.0, 1, 0, 1, 0], [0, 0, 1, 1, 1]])


def reference(logits, labels, mask):
    return F.cross_entropy(logits[mask.bool()], labels[mask.bool()])


def test_the_loss_is_the_mean_over_what_the_mask_counts(group, batch):
    logits, labels, mask = batch
    loss = next_token_loss(group)(logits, {"labels": labels, "loss_mask": mask})
    torch.testing.assert_close(loss, reference(logits, labels, mask))


def test_gradients_are_those_of_the_mean(group, batch):
    logits, labels, mask = batch
    (ours,) = torch.autograd.grad(
        next_token_loss(group)(logits, {"labels": labels, "loss_mask": mask}), logits
    )
    (expected,) = torch.autograd.grad(reference(logits, labels, mask), logits)
    torch.testing.assert_close(ours, expected)
    assert (ours[~mask.bool()] == 0).all()


def test_a_mask_of_ones_counts_everything(group, batch):
    logits, labels, _ = batch
    loss = next_token_loss(group)(logits, {"labels": labels, "loss_mask": torch.ones(2, 5)})
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_16_bit_logits_give_a_32_bit_loss(group, batch):
    logits, labels, mask = batch
    loss = next_token_loss(group)(logits.bfloat16(), {"labels": labels, "loss_mask": mask})
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference(logits.bfloat16().float(), labels, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("largest", [0.0, 50.0])
def test_padded_columns_never_count(group, batch, dtype, largest):
    logits, labels, mask = batch
    logits = logits.detach().to(dtype).requires_grad_()
    padding = torch.full((2, 5, 4), largest, dtype=dtype)
    padded = torch.cat([logits.detach(), padding], -1).requires_grad_()
    expected = next_token_loss(group)(logits, {"labels": labels, "loss_mask": mask})
    loss = next_token_loss(group, vocab_size=7)(padded * 1, {"labels": labels, "loss_mask": mask})
    assert torch.equal(loss, expected)
    (ours,) = torch.autograd.grad(loss, padded)
    (theirs,) = torch.autograd.grad(expected, logits)
    assert torch.equal(ours[..., :7], theirs)
    assert not ours[..., 7:].any()
    assert next_token_loss(group)(padded * 1, {"labels": labels, "loss_mask": mask}) > expected
