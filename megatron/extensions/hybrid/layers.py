"""Hybrid networks: a GPT's list of layers with layers of one part each."""

from dataclasses import replace

from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.hybrid.flags import HybridSpec
from megatron.extensions.hybrid.gated_attention import GatedAttention
from megatron.extensions.hybrid.mixers import GatedDeltaNet, Mamba2
from megatron.extensions.hybrid.pattern import ATTENTION, DELTA_NET, MAMBA
from megatron.model.gpt import gpt_layers
from megatron.model.layers.attention import ParallelAttention
from megatron.model.layers.experts import build_mlp
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import Block, Layer, Step
from megatron.model.layers.norms import norm_layer, residual_and_norm
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe


def hybrid_layers(spec: ModelSpec, parts: LayerParts) -> list[Step]:
    """Return the layers of a GPT, each transformer layer replaced by one of the pattern."""
    return [_of_pattern(step) for step in gpt_layers(spec, parts)]


def _of_pattern(step: Step) -> Step:
    if isinstance(step, Layer) and step.cls is ParallelTransformerLayerPipe:
        return replace(step, cls=HybridLayerPipe)
    return step


class HybridLayerPipe(Block):
    """x + dropout(part(norm(x))), whose part is the one that the pattern has for the layer.

    Each document resets the states of recurrent layers, where documents do not see each other.

    Args:
        spec: the network.
        parts: what its layers are built with.
        number: the layer's, from 1 on.

    Shapes: hidden [s, b, h] -> [s, b, h], in its dtype.
    Communication: one all-reduce of [s, b, h] over the group forward, one backward.
    Randomness: residual dropout draws from the ordinary stream, attention from `parts.rng`.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int):
        super().__init__()
        self.spec, self.kernels, self.number = spec, parts.kernels, number
        self.kind = spec.part(HybridSpec).kind_of(number)
        norm = norm_layer(spec, kernels=parts.kernels).build()
        mixers: dict[str, type[nn.Module]] = {MAMBA: Mamba2, DELTA_NET: GatedDeltaNet}
        if self.kind not in (*mixers, ATTENTION):
            self.pre_mlp_layernorm = norm
            self.mlp = build_mlp(spec, parts, number=number)
            return
        self.input_layernorm = norm
        if self.kind in mixers:
            self.mixer = mixers[self.kind](spec, parts)
        else:
            is_gated = spec.part(HybridSpec).attention_output_gate
            attention = GatedAttention if is_gated else ParallelAttention
            self.self_attention = attention(spec, parts, number=number)

    def forward(self, inputs: LayerInput) -> LayerInput:
        """Return the input with other activations."""
        norm = self.pre_mlp_layernorm if hasattr(self, "mlp") else self.input_layernorm
        x_sbh, normed_sbh = residual_and_norm(norm, inputs.hidden)
        y_sbh, bias = self._part(inputs, normed_sbh)
        factor = self.spec.residual_multiplier
        if factor != 1:
            y_sbh, bias = y_sbh * factor, None if bias is None else bias * factor
        dropout = self.spec.hidden_dropout
        total = self.kernels.bias_dropout_add(y_sbh, bias, x_sbh, dropout, self.training)
        return inputs.replace(hidden=total)

    def _part(self, inputs: LayerInput, normed_sbh: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layer's part, and the bias that is left to add."""
        spans_bs2 = inputs.attention_span
        output: tuple[Tensor, Tensor | None]
        if self.kind == ATTENTION:
            output = self.self_attention(
                normed_sbh, inputs.positions, spans_bs2, shared=inputs.shared
            )
        elif hasattr(self, "mixer"):
            output = self.mixer(normed_sbh, None if spans_bs2 is None else spans_bs2[..., 0]), None
        else:
            output = self.mlp(normed_sbh)
        return output
