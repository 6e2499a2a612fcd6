"""A trained model in one process, for inference."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron.errors import CheckpointError
from megatron.model.gpt import gpt_layers
from megatron.model.layers import SequentialModel
from megatron.parallel.groups import lone_group
from megatron.parallel.random import OrdinaryStream
from megatron.plan.model_spec import ModelSpec


def build_gpt(spec: ModelSpec, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Return the model with these whole weights, in 32-bit floats, ready for inference.

    Raises:
        CheckpointError: the weights are not those of `spec`.
    """
    steps = gpt_layers(spec, group=lone_group(), rng=OrdinaryStream(), mixed=False)
    model = SequentialModel(steps)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's weights do not fit its plan: {error}") from error
    return model.eval().to(device)
