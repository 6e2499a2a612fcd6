"""A trained model in one process, from a checkpoint of any layout."""

from pathlib import Path

import torch
from torch import nn

from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.weights import read_whole_weights
from megatron.errors import CheckpointError
from megatron.model.gpt import gpt_layers
from megatron.model.layers import SequentialModel
from megatron.parallel.groups import lone_group
from megatron.parallel.random import OrdinaryStream
from megatron.plan.model_spec import ModelSpec


def load_gpt(folder: Path, manifest: Manifest, spec: ModelSpec, device: torch.device) -> nn.Module:
    """Return the model of the checkpoint in `folder`, in 32-bit floats, ready for inference.

    Raises:
        CheckpointError: the weights are not those of `spec`.
    """
    steps = gpt_layers(spec, group=lone_group(), rng=OrdinaryStream(), mixed=False)
    model = SequentialModel(steps)
    try:
        model.load_state_dict(read_whole_weights(folder, manifest))
    except RuntimeError as error:
        raise CheckpointError(f"{folder} does not fit its own plan: {error}") from error
    return model.eval().to(device)
