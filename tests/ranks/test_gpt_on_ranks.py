"""The network over two processes against the same network in one."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from dataclasses import replace
from itertools import product

import pytest
import torch
from networks import gpt_steps
from ranks import outcomes_on_ranks, require_passed
from tiny import GEMMA_2, GEMMA_3, batch_of, tiny_spec
from torch.testing import assert_close

from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.grad_stats import clip_gradients
from megatron.engine.deepspeed.mpu import Mpu
from megatron.engine.deepspeed.recompute import (
    recompute,
    restore_streams,
    start_streams,
    stream_states,
)
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import Recomputation, SequentialModel
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.model.loss import next_token_loss
from megatron.tensor_parallel.process_groups import build_groups, lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import all_reduce_partial_gradients, shard_of
from megatron.tensor_parallel.topology import Topology

FOUR_HEADS = {"num_attention_heads": 4, "head_dim": 4}
LLAMA = FOUR_HEADS | {
    "num_query_groups": 2,
    "position_embedding": "rotary",
    "rotary_dim": 4,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "linear_bias": False,
    "qkv_bias": False,
    "tied_embeddings": False,
}
BLOOM = {"num_attention_heads": 6, "position_embedding": "alibi", "embed_layernorm": True}
SPECS = [
    {},
    {"head_dim": 5, "ffn_hidden_size": 22, "num_layers": 3, "padded_vocab_size": 14},
    LLAMA,
    LLAMA
    | {
        "activation": "geglu_tanh",
        "scaled_embedding": True,
        "layernorm_1p": True,
        "tied_embeddings": True,
    },
    LLAMA | {"qk_layernorm": True, "layernorm_1p": True, "window": 3, "linear_bias": True},
    FOUR_HEADS | {"activation": "relu", "attention_bias_apart": True, "qkv_bias": False},
    FOUR_HEADS | {"window": 3, "full_attention_layers": (2,)},
    GEMMA_2 | FOUR_HEADS | {"rotary_dim": 4},
    GEMMA_3 | FOUR_HEADS | {"rotary_dim": 4, "tied_embeddings": False, "logit_softcap": 2.0},
    # Fewer query groups than ranks.
    LLAMA | {"num_query_groups": 1},
    LLAMA | {"num_query_groups": 1, "qk_layernorm": True, "qkv_bias": True},
    FOUR_HEADS | {"num_query_groups": 1, "position_embedding": "alibi"},
    BLOOM | {"activation": "geglu", "residual_after_norm": True},
    FOUR_HEADS | {"position_embedding": "none", "qk_layernorm": True, "activation": "reglu"},
    {
        "activation": "squared_relu",
        "linear_bias": False,
        "attention_bias_apart": True,
        "tied_embeddings": False,
        "parallel_residual": True,
    },
]
NAMES = [ParallelTransformerLayerPipe.__name__]


def every_one(count):
    return [range(i, i + 1) for i in range(count)]


def groups_of(**axes):
    return build_groups(Topology(**({"pipeline": 1, "data": 1, "tensor": 1} | axes)))


def streams(groups, seed=5):
    distributed.start("gloo")
    return start_streams(groups, seed=seed, activation_checkpointing={})


def model_of(group, rng, *, wrap=None, kernels=REFERENCE, **changes):
    spec = tiny_spec(init_std=0.3, **changes)
    model = SequentialModel(
        gpt_steps(spec, group=group, rng=rng, mixed=False, kernels=kernels),
        recomputation=wrap and Recomputation(every_one, wrap),
    )
    initialise(model, seed=1, std=spec.init_std, num_layers=spec.num_layers)
    return model


def batch(seed=0):
    torch.manual_seed(seed)
    rows = torch.randint(11, (3, 7))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]])
    return batch_of(tokens, positions, labels=labels, loss_mask=torch.ones(labels.shape))


def piece(name, whole, sharded_parameters):
    shard = shard_of(sharded_parameters[name])
    return whole if shard is None else whole.chunk(shard.count, shard.dim)[shard.index]


def whole_model_step(group, **changes):
    """Return the one-process model after a backward pass."""
    whole = model_of(lone_group(), OrdinaryStream(), **changes)
    given = batch()
    next_token_loss(lone_group())(whole(given), given).backward()
    return whole


def logits_of_shards_are_those_of_the_whole(rank):
    for changes in SPECS:
        groups = groups_of(tensor=2)
        shard = model_of(groups.tensor, OrdinaryStream(), **changes)
        whole = model_of(lone_group(), OrdinaryStream(), **changes)
        given = batch()
        assert_close(shard(given), whole(given).chunk(2, -1)[rank])


def gradients_of_shards_are_those_of_the_whole(rank):
    for changes, summed in product(SPECS, (False, True)):
        groups = groups_of(tensor=2)
        kernels = replace(REFERENCE, split_sums_bias=summed)
        shard = model_of(groups.tensor, OrdinaryStream(), kernels=kernels, **changes)
        all_reduce_partial_gradients(shard.parameters())
        whole = whole_model_step(groups.tensor, **changes)
        given = batch()
        next_token_loss(groups.tensor)(shard(given), given).backward()
        parameters = dict(shard.named_parameters())
        for name, parameter in whole.named_parameters():
            assert_close(parameters[name].grad, piece(name, parameter.grad, parameters))


def the_norm_is_that_of_the_whole_and_clipping_scales_to_it(rank):
    groups = groups_of(tensor=2)
    shard, whole = model_of(groups.tensor, OrdinaryStream()), whole_model_step(groups.tensor)
    given = batch()
    next_token_loss(groups.tensor)(shard(given), given).backward()
    before = {name: p.grad.clone() for name, p in shard.named_parameters()}
    expected = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.25))

    assert expected > 0.5
    high = clip_gradients(shard.parameters(), groups, 2 * expected)
    assert high == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(p.grad, before[name]) for name, p in shard.named_parameters())

    assert clip_gradients(shard.parameters(), groups, 0.25) == pytest.approx(expected, rel=1e-5)
    parameters = dict(shard.named_parameters())
    for name, parameter in whole.named_parameters():
        assert_close(parameters[name].grad, piece(name, parameter.grad, parameters))


def a_weight_that_two_stages_share_counts_once(rank):
    groups = groups_of(pipeline=2)
    tied, own = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(1))
    tied.grad, own.grad = torch.full((4,), 3.0), torch.full((1,), 8.0 if rank else 0.0)
    tied.ds_pipe_replicated = rank == 1
    assert clip_gradients([tied, own], groups, 1.0) == pytest.approx(10.0)
    assert_close(tied.grad, torch.full((4,), 0.3))


def attention_drops_other_weights_on_every_tensor_rank(rank):
    groups = groups_of(tensor=2)
    tracker = streams(groups)
    with tracker.fork():
        own = torch.rand(1000)
    assert agreement(own) < 0.01
    # Those of other stages and replicas differ as well: see below for what feeds them.


def features_are_dropped_alike_on_every_tensor_rank(rank):
    streams(groups_of(tensor=2))
    assert agreement(torch.rand(1000)) == 1.0


def replicas_drop_other_features_and_other_weights(rank):
    tracker = streams(groups_of(data=2))
    assert agreement(torch.rand(1000)) < 0.01
    with tracker.fork():
        own = torch.rand(1000)
    assert agreement(own) < 0.01


def stages_drop_other_features_and_other_weights(rank):
    tracker = streams(groups_of(pipeline=2))
    assert agreement(torch.rand(1000)) < 0.01
    with tracker.fork():
        own = torch.rand(1000)
    assert agreement(own) < 0.01


def agreement(own):
    """Return the share of numbers that are equal on both ranks."""
    both = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(both, own)
    return float((both[0] == both[1]).float().mean())


def the_tensor_stream_is_another_than_the_ordinary_one_and_leaves_it_alone(rank):
    tracker = streams(groups_of(tensor=2))
    ordinary = torch.rand(100)
    streams(groups_of(tensor=2))
    with tracker.fork():
        forked = torch.rand(100)
    assert torch.equal(torch.rand(100), ordinary)
    assert not torch.equal(forked, ordinary)


def hidden_dropout_keeps_the_residual_stream_equal_on_tensor_ranks(rank):
    groups = groups_of(tensor=2)
    tracker = streams(groups)
    model = model_of(groups.tensor, tracker, hidden_dropout=0.5, attention_dropout=0.5)
    seen = []
    model.get_submodule("6").register_forward_hook(lambda layer, inputs, y: seen.append(y))
    model(batch())
    assert agreement(seen[0].detach().flatten()) == 1.0


def recomputation_changes_no_bit_with_dropout_on(rank):
    kept, recomputed = two_steps(None, num_layers=1), two_steps(recompute, num_layers=1)
    for name in kept:
        assert torch.equal(kept[name], recomputed[name]), name


def recomputation_of_many_layers_changes_rounding_at_most(rank):
    # Gradients between recomputed layers lie in another order in memory: sums of biases may round
    # otherwise. Other dropout would change all of them by far more.
    kept, recomputed = two_steps(None, num_layers=3), two_steps(recompute, num_layers=3)
    assert torch.equal(kept["losses"], recomputed["losses"])
    for name in kept:
        assert_close(recomputed[name], kept[name], rtol=1e-6, atol=1e-7)


def two_steps(wrap, **changes):
    """Return losses and summed gradients of two steps, and where the streams stand after them."""
    groups = groups_of(tensor=2)
    tracker = streams(groups)
    start = stream_states()
    model = model_of(
        groups.tensor, tracker, wrap=wrap, attention_dropout=0.3, hidden_dropout=0.3, **changes
    )
    given = batch()
    restore_streams(start)
    losses = []
    for _ in range(2):
        loss = next_token_loss(groups.tensor)(model(given), given)
        loss.backward()
        losses.append(loss.detach())
    assert losses[0] != losses[1]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with tracker.fork():
        forked = torch.rand(5)
    return {"losses": torch.stack(losses), "forked": forked, "ordinary": torch.rand(5)} | gradients


class Counter:
    """Counts the tensors that autograd keeps."""

    count = 0

    def keep(self, tensor):
        self.count += 1
        return tensor


def recomputation_keeps_less(rank):
    groups = groups_of(tensor=2)
    tracker = streams(groups)
    counts = []
    for wrap in (None, recompute):
        model, kept = model_of(groups.tensor, tracker, wrap=wrap), Counter()
        with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda t: t):
            model(batch())
        counts.append(kept.count)
    assert counts[1] < counts[0] / 2


def without_gradients_nothing_is_recomputed(rank):
    groups = groups_of(tensor=2)
    model = model_of(groups.tensor, streams(groups), wrap=recompute).eval()
    with torch.no_grad():
        expected = model_of(groups.tensor, OrdinaryStream()).eval()(batch())
        assert torch.equal(model(batch()), expected)


def deepspeed_is_told_the_topology(rank):
    for axes in ({"tensor": 2}, {"data": 2}, {"pipeline": 2}):
        groups = groups_of(**axes)
        mpu, topology = Mpu(groups), groups.topology
        assert mpu.get_tensor_model_parallel_world_size() == topology.tensor
        assert mpu.get_tensor_model_parallel_rank() == topology.tensor_rank_of(rank)
        assert mpu.get_tensor_model_parallel_group() is groups.tensor
        assert mpu.get_pipeline_model_parallel_world_size() == topology.pipeline
        assert mpu.get_data_parallel_world_size() == topology.data
        assert mpu.get_data_parallel_rank() == topology.data_rank_of(rank)
        assert mpu.get_data_parallel_group() is groups.data
        assert mpu.get_model_parallel_world_size() == topology.tensor * topology.pipeline
        assert mpu.get_model_parallel_group() is groups.model
        members = torch.distributed.get_process_group_ranks(groups.model)
        assert mpu.get_model_parallel_rank() == members.index(rank)


CHECKS = [
    logits_of_shards_are_those_of_the_whole,
    gradients_of_shards_are_those_of_the_whole,
    the_norm_is_that_of_the_whole_and_clipping_scales_to_it,
    a_weight_that_two_stages_share_counts_once,
    attention_drops_other_weights_on_every_tensor_rank,
    features_are_dropped_alike_on_every_tensor_rank,
    replicas_drop_other_features_and_other_weights,
    stages_drop_other_features_and_other_weights,
    the_tensor_stream_is_another_than_the_ordinary_one_and_leaves_it_alone,
    hidden_dropout_keeps_the_residual_stream_equal_on_tensor_ranks,
    recomputation_changes_no_bit_with_dropout_on,
    recomputation_of_many_layers_changes_rounding_at_most,
    recomputation_keeps_less,
    without_gradients_nothing_is_recomputed,
    deepspeed_is_told_the_topology,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
