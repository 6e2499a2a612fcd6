"""The largest tensor of a step, for losses of logits that are computed in chunks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tiny import tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.architecture.architecture import network_of
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.rng import OrdinaryStream


class Largest(TorchDispatchMode):
    """Keeps the most elements that a result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def largest_tensor(
    group: object,
    loss: Callable[..., Any],
    chunk_tokens: int,
    fields: Iterable[str],
    **own: Any,
) -> int:
    """Return the elements of the largest tensor that a step's forward and backward pass make."""
    spec = tiny_spec(
        **{"vocab_size": 512, "padded_vocab_size": 512},
        **{"seq_length": 16, "max_position_embeddings": 16},
        **{"hidden_size": 8, "num_attention_heads": 2, "head_dim": 4},
        **{"num_layers": 1, "ffn_hidden_size": 16, **own},
    )
    parts = LayerParts(
        group=group,
        rng=OrdinaryStream(),
        mixed=False,
        core_attention=core_attention_of(spec, REFERENCE),
        batch_fields=tuple(fields),
        loss_chunk_tokens=chunk_tokens,
    )
    model = SequentialModel(network_of(spec).layers(spec, parts))
    initialise(model, seed=1, std=0.3, num_layers=1)
    tokens = torch.randint(512, (4, 16))
    batch = {
        "tokens": tokens,
        "decoder_tokens": tokens,
        "token_types": torch.zeros_like(tokens),
        "positions": torch.arange(16).expand_as(tokens),
        "labels": tokens,
        "loss_mask": torch.ones(4, 16),
        "lengths": torch.full((4,), 16),
        "is_random": torch.zeros(4, dtype=torch.int64),
    }
    if "attention_span" in fields:
        batch["attention_span"] = torch.tensor([0, 16]).expand(4, 1, 2)
    with Largest() as seen:
        output = loss(model(batch), batch)
        (output if isinstance(output, torch.Tensor) else output.total).backward()
    assert all(p.grad is not None for p in model.parameters())
    return seen.elements
