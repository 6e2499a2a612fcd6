"""Networks of families of transformers over two processes against the same networks in one."""

import torch
from checkpoints import spread_network
from families import decoded_logits, logits_and_gradients, require_close, sample
from networks import gpt_steps
from stages import whole_weights
from tiny import batch_of

from megatron.checkpointing.resharding.sharded_tensor import ParameterState
from megatron.config.network.model_spec import ModelSpec
from megatron.inference.runner.model_runner import fill_parameters
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.tensor_parallel.process_groups import Groups, build_groups, lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import (
    all_reduce_partial_gradients,
    mark_replicated_gradients,
    shard_of,
)
from megatron.tensor_parallel.topology import Topology


def compare_families(
    rank: int, specs: dict[str, ModelSpec], dtype: torch.dtype = torch.float32
) -> None:
    """Compare logits, gradients and decode steps of two tensor-parallel ranks, and of two stages.

    Args:
        dtype: of logits and gradients; 64 bits where gradients are small sums of large numbers.
    """
    tensor, pipeline = (
        build_groups(Topology(**{"pipeline": 1, "data": 1, "tensor": 1} | axes))
        for axes in ({"tensor": 2}, {"pipeline": 2})
    )
    tokens, rows = sample(), torch.arange(2)[:, None]
    for name, spec in specs.items():
        model = spread_network(spec, lone_group())
        weights = whole_weights(model)
        logits, gradients = logits_and_gradients(model.to(dtype), tokens)
        for sequence_parallel in (False, True):
            shard = shard_of_network(spec, weights, tensor, sequence_parallel=sequence_parallel)
            shard.to(dtype)
            found = shard(batch_of(tokens, torch.arange(tokens.size(1)).expand_as(tokens)))
            what = f"{name}, sequence parallel: {sequence_parallel}"
            require_close(found, logits.chunk(2, -1)[rank], what)
            labels = {"labels": tokens.roll(-1, 1), "loss_mask": torch.ones(tokens.shape)}
            next_token_loss(tensor.tensor)(found, labels).backward()
            for parameter_name, parameter in shard.named_parameters():
                part, full = shard_of(parameter), gradients[parameter_name]
                own = full if part is None else full.chunk(part.count, part.dim)[part.index]
                require_close(parameter.grad, own, f"{what}: {parameter_name}")
        for layout, groups in (("tensor", tensor), ("pipeline", pipeline)):
            decoded, positions_bn = decoded_logits(spec, weights, tokens, groups)
            assert (decoded is None) is (layout == "pipeline" and rank == 0)
            if decoded is not None:
                require_close(
                    decoded, logits[rows, positions_bn].float(), f"{name}, {layout} ranks"
                )


def shard_of_network(
    spec: ModelSpec,
    weights: dict[str, ParameterState],
    groups: Groups,
    *,
    sequence_parallel: bool,
) -> SequentialModel:
    """Return this rank's part of a network in training."""
    steps = gpt_steps(
        spec, group=groups.tensor, rng=OrdinaryStream(), sequence_parallel=sequence_parallel
    )
    model = SequentialModel(steps)
    fill_parameters(model, weights)
    if sequence_parallel:
        mark_replicated_gradients(model, groups.tensor)
    all_reduce_partial_gradients(model.parameters())
    return model.eval()
