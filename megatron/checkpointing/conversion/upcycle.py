"""Upcycling: a dense network becomes a mixture of experts that computes the same function."""

import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing.conversion.network import (
    initial_weight,
    parameters_of,
    partition_dims_of,
)
from megatron.checkpointing.manifest import CONVERTED_FROM, Manifest, published_tags, read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    wrap_full_tensor,
)
from megatron.checkpointing.resharding.universal import publish_full, read_checkpoint
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import WrongCheckpointError, raise_if_any
from megatron.common.version import VERSION
from megatron.config.architecture.architecture import network_of
from megatron.config.checks.experts import problems_of_flags
from megatron.config.network.experts import ExpertConfig, MoESpec, moe_spec, plan_experts
from megatron.config.network.model_spec import ModelSpec, flat

_EXPERTS, _ROUTER = ".mlp.experts.", ".mlp.router."


def upcycle(source: Path, directory: Path, experts: ExpertConfig, granularity: int = 1) -> Path:
    """Write the dense checkpoint `source` as experts, iteration 0 of `directory`; return its folder.

    Each expert is one of `granularity` slices of a layer's MLP, so that as many consecutive experts are a
    copy of it. The experts of a copy have the same row of the router, whose weights of the chosen experts
    have a sum of 1: a token goes to complete copies, and the output is that of the MLP once the narrowing
    matrix is multiplied by `granularity`, whatever the activation.

    Memory: one parameter of the experts.

    Args:
        source: folder of one checkpoint, or directory of several, of which the newest is read.
        granularity: number of slices.

    Raises:
        CheckpointError: the network has experts already, or `directory` holds checkpoints.
        ConfigError: the experts cannot compute the same function.

    Randomness: the rows of routers, seeded by their names.
    Source: arXiv:2212.05055, section 3, and arXiv:2410.07524, section 3, for slices; there both matrices
        are scaled, which is exact for homogeneous activations alone.
    """
    folder = checkpoint_of(source)
    manifest = read_manifest(folder)
    if published_tags(directory):
        raise WrongCheckpointError(f"--save {directory} holds checkpoints already: give another")
    dense = manifest.spec
    if dense.moe or dense.lora or "num_experts" not in network_of(dense).options:
        what = (
            "experts" if dense.moe else "adapters" if dense.lora else "no layers that take experts"
        )
        raise WrongCheckpointError(
            f"{folder} has {what}: only a dense network without adapters is upcycled"
        )
    raise_if_any(_problems(dense, experts, granularity))
    experts = replace(experts, moe_ffn_hidden_size=dense.mlp.ffn_hidden_size // granularity)
    spec = replace(dense, moe=moe_spec(experts, dense.num_layers))
    full = read_checkpoint(folder, manifest, optimizer=False)
    makers = {
        name: partial(_parameter, full, name, tuple(parameter.shape), spec, granularity)
        for name, parameter in parameters_of(spec).items()
    }
    return publish_full(
        directory,
        _manifest(manifest, folder, spec, experts),
        FullCheckpoint(parameters=LazyParameters(makers)),
    )


def _problems(dense: ModelSpec, experts: ExpertConfig, granularity: int) -> Iterator[str]:
    """Yield why experts do not compute the function of a dense network."""
    found = [*problems_of_flags(experts, dense.num_layers)]
    if found or not experts.num_experts or max(experts.num_experts) < 2:
        yield from found or ["--num-experts is required: 2 or more"]
        return
    moe = moe_spec(experts, dense.num_layers) or MoESpec()
    slices, width = granularity, dense.mlp.ffn_hidden_size
    flag = f"--moe-upcycling-granularity {slices}"
    if slices < 1 or width % slices:
        yield f"{flag} does not divide --ffn-hidden-size {width}"
        return
    if moe.expert_ffn_hidden_size not in (0, width // slices):
        yield (
            f"--moe-ffn-hidden-size {moe.expert_ffn_hidden_size} is not {width // slices}, the width of "
            f"{width} features in {slices} slices: leave it out"
        )
    if not moe.router_normalises:
        yield (
            "the weights of a token's experts need a sum of 1, or the function changes: write "
            "--topk 2 or more, without --moe-router-pre-softmax and sinkhorn"
        )
    for name, number in (
        ("--num-experts", [*{*moe.num_experts} - {1}]),
        ("--topk", [moe.experts_per_token]),
        (
            "experts in a group",
            [n // moe.router_groups for n in {*moe.num_experts} - {1} if moe.router_groups],
        ),
    ):
        for value in number:
            if value % slices:
                yield f"{name}: {value} is no multiple of {flag}: a token needs all slices of a copy"
    if moe.residual_experts or moe.shared_expert_ffn_hidden_size:
        yield "an MLP of every token adds to the function: leave --mlp-type residual and shared experts out"


@torch.no_grad()
def _parameter(
    dense: FullCheckpoint, name: str, shape: tuple[int, ...], spec: ModelSpec, slices: int
) -> ParameterState:
    if _ROUTER in name:
        rows = initial_weight(name, (shape[0] // slices, *shape[1:]), spec.init_std)
        # Without a matrix it is the bias that balances experts.
        router = rows.repeat_interleave(slices, 0) if len(shape) > 1 else torch.zeros(shape)
        return ParameterState(weight=wrap_full_tensor(router))
    if _EXPERTS not in name:
        return dense.parameters[name]
    weight = dense.parameters[name.replace(_EXPERTS, ".mlp.")].weight.all()
    return ParameterState(weight=wrap_full_tensor(_experts(name, weight, shape[0], spec, slices)))


def _experts(name: str, weight: Tensor, count: int, spec: ModelSpec, slices: int) -> Tensor:
    """Return the weights of `count` experts, [count, ...], from the weight or bias of an MLP.

    Matrices of experts have inner features as rows. Those of a gated MLP alternate between gate and
    product, so that a slice of rows has both.
    """
    scale = 1 / spec.part(MoESpec).router_scale
    if "dense_h_to_4h" in name:
        parts = weight.unflatten(0, (slices, -1))
    elif name.endswith(".bias"):
        # The weights of the experts, each with this bias, have a sum of 1.
        parts = (weight * scale).expand(slices, -1)
    else:
        parts = (weight.T * (slices * scale)).unflatten(0, (slices, -1))
    return parts.repeat(count // slices, *[1] * (parts.dim() - 1))


def _manifest(dense: Manifest, folder: Path, spec: ModelSpec, experts: ExpertConfig) -> Manifest:
    plan = {**dense.plan, "model": flat(spec), "experts": asdict(plan_experts(experts))}
    versions = {"megatron": VERSION, "torch": str(torch.__version__)}
    return replace(
        dense,
        state=TrainState(),
        plan=plan,
        config={**dense.config, "experts": asdict(experts)},
        versions={**versions, "python": platform.python_version(), CONVERTED_FROM: str(folder)},
        partition_dims=partition_dims_of(spec),
        files=(),
    )
