"""The loss against torch's own, of logits that exist and of those computed in chunks of tokens."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from loss_memory import largest_tensor
from networks import gpt_steps
from tiny import tiny_spec

from megatron.fused_kernels.reference.cross_entropy import REFERENCE as CROSS_ENTROPY
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.layers.deferred_logits import defer_logits
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import CAUSAL_FIELDS
from megatron.tensor_parallel.rng import OrdinaryStream


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
    # A vector unit adds 7 columns and 11 in different orders.
    torch.testing.assert_close(loss, expected)
    (ours,) = torch.autograd.grad(loss, padded)
    (theirs,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(ours[..., :7], theirs)
    assert not ours[..., 7:].any()
    assert next_token_loss(group)(padded * 1, {"labels": labels, "loss_mask": mask}) > expected


class TestChunks:
    """Deferred logits: the loss computes those of a few tokens at a time."""

    def head(self, *, bias=False, dtype=torch.float32, b=3, s=5, h=8, v=12):
        hidden, weight = torch.randn(b, s, h, dtype=dtype), torch.randn(v, h, dtype=dtype)
        parts = [hidden, weight, *([torch.randn(v, dtype=dtype)] if bias else [])]
        return [x.requires_grad_() for x in parts]

    def batch(self, b=3, s=5):
        return {"labels": torch.randint(11, (b, s)), "loss_mask": torch.rand(b, s)}

    def full(self, parts, softcap=0.0):
        hidden, weight, *bias = parts
        logits = hidden @ weight.T
        logits = softcap * (logits.float() / softcap).tanh() if softcap else logits
        return logits + bias[0] if bias else logits

    def deferred(self, parts, chunk_tokens, softcap=0.0):
        hidden, weight, *bias = parts
        logits = defer_logits(hidden, weight, softcap=softcap, chunk_tokens=chunk_tokens)
        return logits.with_bias(bias[0]) if bias else logits

    @pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 100])
    @pytest.mark.parametrize("softcap", [0.0, 3.0])
    @pytest.mark.parametrize("bias", [False, True])
    def test_loss_and_gradients_are_those_of_all_logits(self, group, chunk_tokens, softcap, bias):
        parts, batch = self.head(bias=bias), self.batch()
        loss = next_token_loss(group, vocab_size=11)
        expected = loss(self.full(parts, softcap), batch)
        found = loss(self.deferred(parts, chunk_tokens, softcap), batch)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        # A large loss scale, as in fp16.
        ours, theirs = (torch.autograd.grad(x * 65536, parts) for x in (found, expected))
        for mine, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-2)
        with torch.no_grad():
            evaluated = loss(self.deferred(parts, chunk_tokens, softcap), batch)
        assert torch.equal(evaluated, found)

    def test_in_16_bits_the_table_s_gradient_is_summed_in_32(self, group):
        parts = self.head(dtype=torch.bfloat16, bias=True, b=8, s=32)
        batch = self.batch(b=8, s=32)
        loss = next_token_loss(group)
        wide = [x.detach().float().requires_grad_() for x in parts]
        right = torch.autograd.grad(loss(self.full(wide), batch), wide)
        errors = []
        for logits in (self.deferred(parts, 1), self.deferred(parts, 64), self.full(parts)):
            grads = torch.autograd.grad(loss(logits, batch), parts)
            assert [x.dtype for x in grads] == [torch.bfloat16] * 3
            errors.append(
                [float((x - y).norm() / y.norm()) for x, y in zip(grads, right, strict=True)]
            )
        single, few, full = errors
        assert max(single) < 0.01
        assert max(few) < 0.01
        assert few[1] < 1.5 * full[1]

    def test_frozen_weights_get_no_gradient(self, group):
        hidden, weight, bias = self.head(bias=True)
        batch, loss = self.batch(), next_token_loss(group)
        for trained in ((hidden,), (hidden, bias), (weight,), (bias,)):
            for x in (hidden, weight, bias):
                x.requires_grad_(any(x is y for y in trained))
            parts = [hidden, weight, bias]
            found = torch.autograd.grad(loss(self.deferred(parts, 4), batch), trained)
            expected = torch.autograd.grad(loss(self.full(parts), batch), trained)
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right)

    def test_a_second_backward_pass_is_refused(self, group):
        loss = next_token_loss(group)(self.deferred(self.head(), 4), self.batch())
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_no_tensor_is_as_large_as_the_logits(self, group):
        loss, fields = next_token_loss(group), CAUSAL_FIELDS
        full, chunks = (largest_tensor(group, loss, chunk, fields) for chunk in (0, 8))
        assert full >= 4 * 16 * 512
        # Weights and activations are smaller than a quarter of the logits.
        assert chunks <= 8 * 512


def test_16_bit_logits_are_cast_for_the_reference_kernel_alone(group):
    for kernels, chunk_tokens, last in (
        (REFERENCE, 0, "to_float32"),
        (REFERENCE, 5, "keep_dtype"),
        (replace(REFERENCE, cross_entropy=replace(CROSS_ENTROPY)), 0, "keep_dtype"),
    ):
        steps = gpt_steps(
            tiny_spec(),
            group=group,
            rng=OrdinaryStream(),
            mixed=True,
            kernels=kernels,
            loss_chunk_tokens=chunk_tokens,
        )
        assert steps[-1].__name__ == last
