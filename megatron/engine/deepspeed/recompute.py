"""Recomputation and the random streams it has to rewind, both DeepSpeed's."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor

from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.engine.deepspeed.mpu import Mpu
from megatron.model.layers.attention_kernels import Attend, ScoreOptions
from megatron.model.layers.layer_list import Recomputation
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.rng import RngTracker, stream_seed


def start_streams(
    groups: Groups,
    *,
    seed: int,
    activation_checkpointing: Mapping[str, Any],
    sequence_parallel: bool = False,
) -> RngTracker:
    """Seed every random stream of this process and return the tensor-parallel one.

    Args:
        activation_checkpointing: the block of that name of DeepSpeed's JSON.
        sequence_parallel: whether tensor-parallel ranks see different tokens between regions.
    """
    checkpointing.configure(
        Mpu(groups),
        partition_activations=activation_checkpointing.get("partition_activations"),
        contiguous_checkpointing=activation_checkpointing.get("contiguous_memory_optimization"),
        num_checkpoints=activation_checkpointing.get("number_checkpoints"),
        checkpoint_in_cpu=activation_checkpointing.get("cpu_checkpointing"),
        synchronize=activation_checkpointing.get("synchronize_checkpoint_boundary"),
        profile=activation_checkpointing.get("profile"),
    )
    seed_streams(groups, seed=seed, sequence_parallel=sequence_parallel)
    return checkpointing.get_cuda_rng_tracker()


def seed_streams(groups: Groups, *, seed: int, sequence_parallel: bool) -> None:
    """Begin every random stream of this process anew; see start_streams."""
    part = groups.data_rank * groups.topology.sequence + groups.sequence_rank
    if sequence_parallel:
        part = part * groups.topology.tensor + groups.tensor_rank
    stream = stream_seed(seed, stage=groups.stage, part=part)
    random.seed(stream)
    np.random.seed(stream % 2**32)
    torch.manual_seed(stream)
    checkpointing.model_parallel_cuda_manual_seed(stream)


def recompute(layer: Callable[..., Any], *inputs: Tensor, shared: Iterable[Tensor] = ()) -> Any:
    """Call `layer` and keep its inputs alone; what backward needs is computed again there.

    Args:
        shared: inputs that others read too, kept as they are. DeepSpeed empties the rest where it
            divides them over tensor-parallel ranks or moves them to the CPU.
    """
    if not torch.is_grad_enabled():
        return layer(*inputs)
    for x in shared:
        x.no_checkpointing = True  # type: ignore[attr-defined]
    if any(x.requires_grad for x in inputs):
        return checkpointing.checkpoint(layer, *inputs)
    # After frozen weights: the function above would lose the gradients of the layer itself.
    return checkpointing.non_reentrant_checkpoint(layer, *inputs)


def recomputation(plan: RecomputePlan) -> Recomputation:
    """Return which blocks are computed again as a whole."""
    return Recomputation(groups=plan.groups, call=recompute)


def recomputed_attention(attend: Attend) -> Attend:
    """Return `attend` with selective recompute: attention scores are computed again in backward."""

    def attend_again(query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        # Arguments: what is computed again has a gradient for its arguments alone.
        given = {"bias": how.bias, "sinks_a": how.sinks_a}
        more = {name: x for name, x in given.items() if x is not None}

        def attend_with(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
            changed: Any = dict(zip(more, learned, strict=True))
            return attend(query, key, value, replace(how, **changed))

        weights = [] if how.sinks_a is None else [how.sinks_a]
        return recompute(attend_with, query, key, value, *more.values(), shared=weights)

    return attend_again


def stream_states() -> dict[str, Any]:
    """Return where every random stream of this process stands."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": (version, list(words), gauss),
        "numpy": (name, torch.from_numpy(keys), *rest),
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state(),
        "tensor_parallel": checkpointing.get_cuda_rng_tracker().get_states(),
    }


def restore_streams(states: Mapping[str, Any]) -> None:
    """Put every random stream of this process where `states` says."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    get_accelerator().set_rng_state(states["device"])
    # A copy: the tracker keeps the dictionary that it is given and moves on in it.
    checkpointing.get_cuda_rng_tracker().set_states(dict(states["tensor_parallel"]))
