"""Networks with the reference attention: layers of a GPT, and small ones of downstream tasks."""

from collections.abc import Sequence
from typing import Any

from megatron.common.registry import OBJECTIVES
from megatron.config.architecture.architecture import network_of
from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan.plan import Plan
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import CoreAttention, core_attention_of
from megatron.model.layers.layer_list import SequentialModel, Step
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.rng import OrdinaryStream


def gpt_steps(
    spec: ModelSpec,
    *,
    kernels: Kernels = REFERENCE,
    core_attention: CoreAttention | None = None,
    batch_fields: Sequence[str] = (),
    **parts: Any,
) -> list[Step]:
    """Return the layers of a GPT, or of the network that a spec names."""
    steps: list[Step] = network_of(spec).layers(
        spec,
        LayerParts(
            kernels=kernels,
            core_attention=core_attention or core_attention_of(spec, kernels),
            batch_fields=batch_fields,
            **parts,
        ),
    )
    return steps


def task_network(plan: Plan, group: Any, *, initialises: bool = True) -> SequentialModel:
    """Return the network of an objective or a downstream task, with large initial weights."""
    layers = OBJECTIVES.get(plan.objective.name)().layers(
        plan.model,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(plan.model),
            batch_fields=(),
        ),
    )
    model = SequentialModel(layers)
    if initialises:
        initialise(model, seed=1, std=0.3, num_layers=plan.model.num_layers)
    return model
