"""Layers of a GPT with the reference attention."""

from collections.abc import Sequence
from typing import Any

from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.gpt import gpt_layers
from megatron.model.layers.attention_kernels import CoreAttention, core_attention_of
from megatron.model.layers.layer_list import Step


def gpt_steps(
    spec: ModelSpec,
    *,
    kernels: Kernels = REFERENCE,
    core_attention: CoreAttention | None = None,
    batch_fields: Sequence[str] = (),
    **parts: Any,
) -> list[Step]:
    """Return the layers of a GPT; see `gpt_layers`."""
    return gpt_layers(
        spec,
        kernels=kernels,
        core_attention=core_attention or core_attention_of(spec, kernels),
        batch_fields=batch_fields,
        **parts,
    )
