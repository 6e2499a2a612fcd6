"""Compiled transformer layers of encoders and decoders against the same that are not compiled."""

import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from megatron.config.architecture.architecture import network_of
from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.compiled_blocks import Compiler
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.rng import OrdinaryStream

TRACED = Compiler(mode="default", compiles_loss=True, backend="aot_eager")
"""Traces both passes as inductor does, and generates no code."""


def graphs_of(spec: ModelSpec, fields: tuple[str, ...], group: object) -> int:
    """Return the number of graphs of a compiled network, whose output is that of the plain one."""
    given = {
        "tokens": torch.arange(12).view(2, 6) % 11,
        "positions": torch.arange(6).repeat(2, 1),
        "token_types": torch.zeros(2, 6, dtype=torch.long),
        "lengths": torch.tensor([6, 4]),
        "decoder_tokens": torch.arange(12).view(2, 6) % 11,
    }
    torch.compiler.reset()
    counters.clear()
    outputs = []
    for compiler in (None, TRACED):
        torch.manual_seed(1)
        parts = LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(spec, REFERENCE),
            batch_fields=fields,
        )
        model = SequentialModel(network_of(spec).layers(spec, parts))
        initialise(model, seed=1, std=0.3, num_layers=2)
        if compiler:
            compiler.compile_blocks(model)
        outputs.append(model(given))
    assert_close(*outputs)
    found = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    return found
