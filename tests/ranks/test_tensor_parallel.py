"""Sharded layers against whole ones: two processes, one shard each."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from communication import record_communication
from problems import problem
from ranks import outcomes_on_ranks, require_passed
from torch import nn
from torch.testing import assert_close

from megatron.fused_kernels.reference.cross_entropy import REFERENCE
from megatron.model.loss import next_token_loss
from megatron.tensor_parallel.broadcast import Field, broadcast_batch, pack_batch, sequence_shard
from megatron.tensor_parallel.collectives import (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
)
from megatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.process_groups import build_groups, lone_group
from megatron.tensor_parallel.topology import Topology

WORLD = 2


def column_parallel_linear_equals_linear(rank):
    whole, x = nn.Linear(6, 10), torch.randn(3, 2, 6, requires_grad=True)
    shard = ColumnParallelLinear(6, 10, group=dist.group.WORLD)
    shard.weight.data = whole.weight.data.chunk(WORLD)[rank]
    shard.bias.data = whole.bias.data.chunk(WORLD)[rank]

    expected, y = whole(x), shard(x)
    assert_close(y, expected.chunk(WORLD, -1)[rank])
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
    (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    assert_close(grad, expected_grad)
    expected.square().sum().backward()
    y.square().sum().backward()
    assert_close(shard.weight.grad, whole.weight.grad.chunk(WORLD)[rank])
    assert_close(shard.bias.grad, whole.bias.grad.chunk(WORLD)[rank])


def row_parallel_linear_equals_linear(rank):
    whole, x = nn.Linear(10, 6), torch.randn(3, 2, 10, requires_grad=True)
    shard = RowParallelLinear(10, 6, group=dist.group.WORLD)
    shard.weight.data = whole.weight.data.chunk(WORLD, 1)[rank]
    shard.bias.data = whole.bias.data.clone()

    x_shard = x.detach().chunk(WORLD, -1)[rank].clone().requires_grad_()
    expected, y = whole(x), shard(x_shard) + shard.bias
    assert_close(y, expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    assert_close(x_shard.grad, x.grad.chunk(WORLD, -1)[rank])
    assert_close(shard.weight.grad, whole.weight.grad.chunk(WORLD, 1)[rank])
    assert_close(shard.bias.grad, whole.bias.grad)


def other_products_train_alike_and_gather_their_input_again(rank):
    for column in (True, False):
        for sequence_parallel in (False, True):
            torch.manual_seed(0)
            kind = ColumnParallelLinear if column else RowParallelLinear
            sizes = {"group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
            usual, other = kind(8, 12, **sizes), kind(8, 12, product=Doubled.apply, **sizes)
            for x in usual.parameters():
                torch.nn.init.normal_(x)
            other.load_state_dict(
                {k: v / 2 if k == "weight" else v for k, v in usual.state_dict().items()}
            )
            shape = (4 // (WORLD if sequence_parallel and column else 1), 3, 8 if column else 4)
            own = torch.randn(shape)
            grads = []
            for layer in (usual, other):
                x = own.clone().requires_grad_()
                y = layer(x)
                with record_communication() as record:
                    y.square().sum().backward()
                kinds = [each.kind for each in record.collectives]
                expected = {
                    (True, True): ["all-gather", "reduce-scatter"],
                    (True, False): ["all-reduce"],
                    (False, True): ["all-gather"],
                    (False, False): [],
                }
                assert sorted(kinds) == expected[column, sequence_parallel]
                grads.append((y.detach(), x.grad, layer.weight.grad))
            usual_y, usual_x, usual_w = grads[0]
            assert_close(grads[1], (usual_y, usual_x, 2 * usual_w))


class Doubled(torch.autograd.Function):
    """2 x W^T, which saves its arguments as torch's product does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.flatten(0, -2).mT @ x.flatten(0, -2)


def vocab_parallel_embedding_equals_embedding(rank):
    whole, ids = nn.Embedding(14, 3), torch.tensor([[0, 6, 7, 13], [7, 7, 1, 6]])
    shard = VocabParallelEmbedding(14, 3, group=dist.group.WORLD)
    shard.weight.data = whole.weight.data.chunk(WORLD)[rank]
    assert_close(shard(ids), whole(ids))
    shard(ids).square().sum().backward()
    whole(ids).square().sum().backward()
    assert_close(shard.weight.grad, whole.weight.grad.chunk(WORLD)[rank])


def a_region_copies_forward_and_sums_backward(rank):
    x = torch.randn(4, requires_grad=True)
    y = copy_to_tensor_parallel(x, dist.group.WORLD)
    assert torch.equal(y, x)
    (grad,) = torch.autograd.grad((y * (rank + 1)).sum(), x)
    assert grad.tolist() == [3.0] * 4


def a_region_sums_forward_and_copies_backward(rank):
    x = torch.full((4,), rank + 1.0, requires_grad=True)
    y = reduce_from_tensor_parallel(x * 1, dist.group.WORLD)
    assert y.tolist() == [3.0] * 4
    (grad,) = torch.autograd.grad((y * 5).sum(), x)
    assert grad.tolist() == [5.0] * 4


def regions_take_tensors_that_lie_scattered_in_memory(rank):
    x = torch.randn(3, 4, requires_grad=True)
    assert_close(reduce_from_tensor_parallel((x * 1).T, dist.group.WORLD), 2 * x.T)
    y = copy_to_tensor_parallel(x, dist.group.WORLD)
    (grad,) = torch.autograd.grad(y.T.sum().expand(3).sum(), x)
    assert grad.tolist() == [[6.0] * 4] * 3


def cross_entropy_equals_torch_s(rank):
    for shape, vocab in (((5, 3), 8), ((1, 1), 2), ((7,), 34), ((2, 3, 4), 6)):
        for dtype, scale in ((torch.float32, 1.0), (torch.float32, 1e4), (torch.bfloat16, 3.0)):
            torch.manual_seed(0)
            logits = (scale * torch.randn(*shape, vocab)).to(dtype)
            target, weights = torch.randint(vocab, shape), torch.randn(shape)
            check_cross_entropy(rank, logits, target, weights)


def check_cross_entropy(rank, logits, target, weights):
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.float().flatten(0, -2), target.flatten(), reduction="none")
    expected = expected.view_as(target)
    shard = logits.chunk(WORLD, -1)[rank].clone().requires_grad_()
    before = shard.detach().clone()
    loss = vocab_parallel_cross_entropy(shard, target, dist.group.WORLD, local=REFERENCE)
    assert loss.dtype == torch.float32
    assert_close(loss, expected)
    assert torch.equal(shard, before)
    (expected * weights).sum().backward()
    (loss * weights).sum().backward()
    assert shard.grad.dtype == logits.dtype
    assert_close(shard.grad, whole.grad.chunk(WORLD, -1)[rank])


def padded_columns_never_count(rank):
    # The padding begins within the last slice, at its first column, and within the first slice.
    for padded, vocab in ((8, 7), (8, 4), (12, 3), (2, 1)):
        torch.manual_seed(0)
        whole, target = torch.randn(5, 3, padded), torch.randint(vocab, (5, 3))
        whole[..., vocab:] += 30
        real = whole[..., :vocab].clone().requires_grad_()
        expected = F.cross_entropy(real.flatten(0, -2), target.flatten(), reduction="none")
        shard = whole.chunk(WORLD, -1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            shard * 1, target, dist.group.WORLD, local=REFERENCE, vocab_size=vocab
        )
        assert_close(loss.flatten(), expected)
        expected.sum().backward()
        loss.sum().backward()
        gradient = torch.cat([real.grad, torch.zeros(5, 3, padded - vocab)], -1)
        own = gradient.chunk(WORLD, -1)[rank]
        assert_close(shard.grad, own)
        assert not shard.grad[own == 0].any()


def the_masked_loss_equals_that_of_one_rank(rank):
    logits, labels = torch.randn(2, 5, 8), torch.randint(8, (2, 5))
    mask = torch.tensor([[1.0, 0, 1, 1, 0], [0, 1, 1, 1, 1]])
    batch = {"labels": labels, "loss_mask": mask}
    expected = next_token_loss(lone_group())(logits, batch)
    shard = logits.chunk(WORLD, -1)[rank]
    assert_close(next_token_loss(dist.group.WORLD)(shard, batch), expected)


FIELDS = {
    "loss_mask": Field("bs", torch.float32),
    "tokens": Field("bs"),
    "is_random": Field("b", torch.bool),
    "encoder_tokens": Field("be"),
    "attention_span": Field("bS2"),
}
"""Of an encoder and a decoder of other lengths, in several dtypes."""
LETTERS = {"b": 2, "s": 6, "S": 6, "e": 3}


def a_batch(seed=0):
    torch.manual_seed(seed)
    drawn = {name: torch.rand(field.sizes(LETTERS)) * 5 for name, field in FIELDS.items()}
    return {name: tensor.to(FIELDS[name].dtype) for name, tensor in drawn.items()}


def broadcast(batch, groups):
    packed = None if batch is None else pack_batch(batch, FIELDS, LETTERS)
    return broadcast_batch(packed, FIELDS, LETTERS, groups, torch.device("cpu"))


def require_equal(batch, other):
    assert [*batch] == [*other] == [*FIELDS]
    for name, tensor in batch.items():
        assert tensor.dtype == FIELDS[name].dtype
        assert torch.equal(tensor, other[name])


def the_batch_of_tensor_rank_0_reaches_the_others_in_one_broadcast(rank):
    groups = build_groups(Topology(pipeline=1, data=1, tensor=2))
    sent, calls = dist.broadcast, []
    dist.broadcast = lambda *args, **options: calls.append(sent(*args, **options))
    try:
        received = broadcast(a_batch() if rank == 0 else None, groups)
    finally:
        dist.broadcast = sent
    require_equal(received, a_batch())
    assert len(calls) == 1


def batches_of_replicas_stay_their_own(rank):
    groups = build_groups(Topology(pipeline=1, data=2, tensor=1))
    require_equal(broadcast(a_batch(rank), groups), a_batch(rank))


def another_batch_than_the_declared_one_is_refused(rank):
    groups = build_groups(Topology(pipeline=1, data=2, tensor=1))
    batch = a_batch()
    with problem("['loss_mask'] … declared", ValueError):
        broadcast({"loss_mask": batch["loss_mask"]}, groups)
    with problem("tokens … [2, 5] … bs … [2, 6]", ValueError):
        broadcast(batch | {"tokens": batch["tokens"][:, :5]}, groups)
    with problem("tokens … torch.float32 … torch.int64", ValueError):
        broadcast(batch | {"tokens": batch["tokens"].float()}, groups)


def a_shard_of_the_sequence_holds_slices_of_the_fields_with_an_s(rank):
    batch = a_batch()
    groups = build_groups(Topology(pipeline=1, data=1, tensor=1, sequence=2))
    shard = sequence_shard(batch, FIELDS, groups)
    here = slice(3 * rank, 3 * rank + 3)
    assert torch.equal(shard["tokens"], batch["tokens"][:, here])
    assert torch.equal(shard["loss_mask"], batch["loss_mask"][:, here])
    assert shard["tokens"].is_contiguous()
    for name in ("is_random", "encoder_tokens", "attention_span"):
        assert shard[name] is batch[name]


def a_zigzag_shard_holds_two_chunks_and_what_pads_them(rank):
    batch = a_batch()
    groups = build_groups(Topology(pipeline=1, data=1, tensor=1, sequence=2, zigzag=True))
    shard = sequence_shard(batch, FIELDS, groups)
    padded = F.pad(batch["tokens"], (0, 2))
    chunks = [padded[:, 2 * index : 2 * index + 2] for index in ((0, 3), (1, 2))[rank]]
    assert torch.equal(shard["tokens"], torch.cat(chunks, 1))
    spans = shard["attention_span"]
    assert spans.size(1) == 8
    assert not spans[:, 6:].any()
    assert shard["encoder_tokens"] is batch["encoder_tokens"]


def groups_hold_the_ranks_of_their_axis(rank):
    for axes, sizes, places in (
        ({"tensor": 2}, (2, 1, 2), (0, 0, rank)),
        ({"data": 2}, (1, 2, 1), (0, rank, 0)),
        ({"pipeline": 2}, (1, 1, 2), (rank, 0, 0)),
    ):
        groups = build_groups(Topology(**({"pipeline": 1, "data": 1, "tensor": 1} | axes)))
        assert (groups.tensor.size(), groups.data.size(), groups.model.size()) == sizes
        assert (groups.stage, groups.data_rank, groups.tensor_rank) == places
        assert groups.tensor.rank() == groups.tensor_rank
        assert groups.data.rank() == groups.data_rank


CHECKS = [
    column_parallel_linear_equals_linear,
    row_parallel_linear_equals_linear,
    other_products_train_alike_and_gather_their_input_again,
    vocab_parallel_embedding_equals_embedding,
    a_region_copies_forward_and_sums_backward,
    a_region_sums_forward_and_copies_backward,
    regions_take_tensors_that_lie_scattered_in_memory,
    cross_entropy_equals_torch_s,
    padded_columns_never_count,
    the_masked_loss_equals_that_of_one_rank,
    the_batch_of_tensor_rank_0_reaches_the_others_in_one_broadcast,
    batches_of_replicas_stay_their_own,
    another_batch_than_the_declared_one_is_refused,
    a_shard_of_the_sequence_holds_slices_of_the_fields_with_an_s,
    a_zigzag_shard_holds_two_chunks_and_what_pads_them,
    groups_hold_the_ranks_of_their_axis,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(WORLD, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
