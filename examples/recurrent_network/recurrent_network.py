"""A network from outside of megatron: a GPT of which most layers mix tokens by a gated recurrence.

`--plugin examples/recurrent_network/recurrent_network.py --network recurrent` trains it; see README.md
next to this file, and docs/extending.md for the contracts that it keeps.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.api import NETWORKS
from megatron.config.architecture.architecture import Entry
from megatron.config.architecture.counts import Weights, mlp_weights, norm_width
from megatron.config.network.model_spec import ModelSpec
from megatron.config.network_contract import Network
from megatron.model.gpt import gpt_layers
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import Block, Layer, Step
from megatron.model.layers.mlp import ParallelMLP
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.sharding import mark_sharded


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Layers with a gated linear recurrence."""

    attention_every: int = 4
    """Every N-th layer attends; the others are recurrent."""

    def __post_init__(self) -> None:
        if self.attention_every < 1:
            raise ValueError(f"--attention-every {self.attention_every}: give 1 or more")


class GatedRecurrence(nn.Module):
    """h_t = a_t h_(t-1) + (1 - a_t) v_t; y = W (h * silu(g)), with a, v and g linear in x.

    In generation a layer keeps h after the last token of each sequence.

    Args:
        width: features h of the residual stream, and channels of the recurrence.
        parts: what the network's layers are built with.

    Shapes: [s, b, h] -> [s, b, h].
    Communication: one all-reduce of [s, b, h] forward, one backward; with sequence parallelism an
        all-gather and a reduce-scatter each.
    """

    def __init__(self, width: int, parts: LayerParts):
        super().__init__()
        channels = width // parts.group.size()
        self.inner = ColumnParallelLinear(width, 3 * width, has_bias=False, **parts.division)
        decay = nn.Parameter(torch.full((channels,), 2.0))
        self.decay = mark_sharded(decay, 0, parts.group)
        self.outer = RowParallelLinear(width, width, has_bias=False, **parts.division)
        self.state = parts.state(channels, dtype=torch.float32)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Return the mixed tokens."""
        # Rows are [channel, {decay, value, gate}], so that shards of any number of ranks line up.
        decay, value, gate = self.inner(x_sbh).unflatten(-1, (-1, 3)).unbind(-1)
        a_sbc = torch.sigmoid(decay.float() + self.decay.float())
        before = self.state.read() if self.state else None
        h_sbc = scan(a_sbc, (1 - a_sbc) * value.float(), before)
        if self.state:
            self.state.write(self.state.last(h_sbc))
        y_sbh: Tensor = self.outer(h_sbc.to(x_sbh.dtype) * nn.functional.silu(gate))
        return y_sbh


def scan(a_sbc: Tensor, u_sbc: Tensor, before_bc: Tensor | None = None) -> Tensor:
    """Return h_t = a_t h_(t-1) + u_t for all t, in log2(s) rounds.

    Args:
        before_bc: the state before the first position; None for zeros.

    Shapes: all [s, b, c], the state [b, c].
    """
    if before_bc is not None:
        u_sbc = torch.cat([u_sbc[:1] + a_sbc[:1] * before_bc, u_sbc[1:]])
    reach = 1  # position t has the sum of as many positions up to t
    while reach < len(u_sbc):
        u_sbc = torch.cat([u_sbc[:reach], u_sbc[reach:] + a_sbc[reach:] * u_sbc[:-reach]])
        a_sbc = torch.cat([a_sbc[:reach], a_sbc[reach:] * a_sbc[:-reach]])
        reach *= 2
    return u_sbc


class RecurrentTransformerLayerPipe(Block):
    """x + recurrence(norm(x)), then the same with the MLP.

    Shapes: hidden [s, b, h] -> [s, b, h].
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int):
        super().__init__()
        norm = norm_layer(spec, kernels=parts.kernels)
        self.number = number
        self.input_layernorm = norm.build()
        self.mixer = GatedRecurrence(spec.hidden_size, parts)
        self.post_attention_layernorm = norm.build()
        self.mlp = ParallelMLP(spec, parts)

    def forward(self, inputs: LayerInput) -> LayerInput:
        """Return the input with other activations."""
        x_sbh = inputs.hidden + self.mixer(self.input_layernorm(inputs.hidden))
        y_sbh, bias = self.mlp(self.post_attention_layernorm(x_sbh))
        return inputs.replace(hidden=x_sbh + (y_sbh if bias is None else y_sbh + bias))


@NETWORKS.register("recurrent", flags=RecurrentConfig)
class Recurrent(Network):
    """A decoder of recurrent layers, every N-th of which attends instead."""

    name = "recurrent"
    service = "prompts"
    use = "tools/generate_samples_gpt.py continues texts with it"
    usage = "generate with: tools/generate_samples_gpt.py --load {directory} --prompt TEXT"
    caches = True

    def __init__(self, flags: RecurrentConfig):
        self.every = flags.attention_every

    def layers(self, spec: ModelSpec, parts: LayerParts) -> list[Step]:
        """Return the layers of a GPT with others in most places."""
        return [self._mixing(step) for step in gpt_layers(spec, parts)]

    def _mixing(self, step: Step) -> Step:
        is_block = isinstance(step, Layer) and step.cls is ParallelTransformerLayerPipe
        if is_block and step.kwargs["number"] % self.every:
            return replace(step, cls=RecurrentTransformerLayerPipe)
        return step

    def block(self, spec: ModelSpec, number: int, *, tensor: int, expert: int) -> Entry:
        """Return the layer `number` with its weights."""
        entry = super().block(spec, number, tensor=tensor, expert=expert)
        if not number % self.every:
            return entry
        width = spec.hidden_size
        mixer = (4 * width * width + width) // tensor
        held = mixer + mlp_weights(spec, tensor) + 2 * norm_width(spec, width)
        name = RecurrentTransformerLayerPipe.__name__
        return replace(entry, name=name, weights=Weights(held))
