"""Tiny networks, and what continues text with them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from networks import gpt_steps
from tiny import batch_of
from torch import nn

from megatron.checkpointing.resharding.sharded_tensor import ParameterState, wrap_full_tensor
from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.runner.decode_graphs import Capture
from megatron.inference.runner.model_runner import ModelRunner
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.rng import OrdinaryStream

CPU = torch.device("cpu")


def random_model(group: object, spec: ModelSpec) -> SequentialModel:
    """Return a network with large random weights, its norms and biases too."""
    model = SequentialModel(gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False))
    initialise(model, seed=1, std=0.4, num_layers=spec.num_layers)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def whole_weights(model: nn.Module) -> dict[str, ParameterState]:
    """Return the weights as those of a checkpoint."""
    return {
        name: ParameterState(weight=wrap_full_tensor(tensor))
        for name, tensor in model.state_dict().items()
    }


def engine_of(
    model: nn.Module,
    spec: ModelSpec,
    *,
    rows: int = 4,
    groups: Groups | None = None,
    recompute: bool = False,
    sees_prefix: bool = False,
    control: dist.ProcessGroup | None = None,
    key_rounding: int | None = None,
    capture: Capture | None = None,
    kernels: Kernels = REFERENCE,
    device: torch.device = CPU,
    **options: object,
) -> InferenceEngine:
    """Return what continues text with the weights of `model`."""
    stage = ModelRunner(
        spec,
        whole_weights(model),
        groups=groups or lone_groups(),
        dtype=torch.float32,
        device=device,
        rows=0 if recompute else rows,
        sees_prefix=sees_prefix,
        control=control,
        key_rounding=key_rounding,
        capture=capture,
        kernels=kernels,
    )
    return InferenceEngine(stage, rows=rows, recompute=recompute, **options)


@torch.no_grad()
def plain_logits(
    model: nn.Module, spec: ModelSpec, tokens: Sequence[int], *, prefix: int = 0
) -> torch.Tensor:
    """Return [s, V] of the network itself, without a cache and without padded tokens."""
    positions = torch.arange(len(tokens))
    ends = torch.maximum(positions + 1, torch.tensor(prefix))
    spans = torch.stack([torch.zeros_like(ends), ends], -1)
    inputs = batch_of(torch.tensor([tokens]), positions[None], spans[None])
    return model(inputs)[0, :, : spec.vocabulary.vocab_size]


def plainly_continued(
    model: nn.Module,
    spec: ModelSpec,
    prompt: Sequence[int],
    new: int,
    *,
    stops: Sequence[int] = (),
    prefix: int = 0,
) -> list[int]:
    """Return the most likely tokens one after the other, each from all tokens before it."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < new and len(tokens) < spec.positions.max_position_embeddings:
        tokens.append(int(plain_logits(model, spec, tokens, prefix=prefix)[-1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def completed(engine: InferenceEngine, *requests: Request) -> list[Completion]:
    """Return what becomes of the requests."""
    return list(engine.generate(requests))
