"""Transformer layers: attention and MLP; decoder layers also have cross-attention."""

from typing import Any

from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.model.layers.attention import ParallelCrossAttention
from megatron.model.layers.experts import build_mlp
from megatron.model.layers.latent_attention import build_attention
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import Block
from megatron.model.layers.norms import fuses_sum, norm_layer, residual_and_norm
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.positions import RelativePositions


class ParallelTransformerLayerPipe(Block):
    """x + dropout(attention(norm(x))), then the same with the MLP.

    With sandwich norms outputs of attention and MLP are normalized too, or alone, before dropout.
    With parallel residuals the second norm reads x: x + dropout(attention(norm(x))) +
    dropout(mlp(other norm(x))).

    Attention is causal, unless the input has an attention span. All fields of the input but
    `hidden` are passed on.

    Args:
        spec: the network.
        parts: what its layers are built with.
        number: the layer's, from 1 on.

    Shapes: hidden [s, b, h] -> [s, b, h], in its dtype.
    Communication: two all-reduces of [s, b, h] over `group` forward, two backward.
    Randomness: residual dropout draws from the ordinary stream, attention from `rng`.
    Source: arXiv:2204.06745, section 2.1, for parallel residuals; arXiv:2105.13290, section 2.4,
        for sandwich norms.
    """

    hands_over = False
    """Whether the last addition is left to the next layer."""

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int = 1):
        super().__init__()
        self.spec, self.kernels, self.number = spec, parts.kernels, number
        norm = norm_layer(spec, kernels=parts.kernels)
        self.input_layernorm = norm.build() if spec.norm.input_norm else nn.Identity()
        self.self_attention = build_attention(spec, parts, number=number)
        self.post_attention_layernorm = norm.build() if spec.norm.input_norm else nn.Identity()
        self.mlp = build_mlp(spec, parts, number=number)
        if spec.norm.sandwich_norm:
            self.attention_output_layernorm = norm.build()
            self.mlp_output_layernorm = norm.build()

    def forward(self, inputs: LayerInput) -> LayerInput:
        x_sbh, normed_sbh = residual_and_norm(self.input_layernorm, inputs.hidden, inputs.pending)
        y_sbh, bias = self.attend(inputs, normed_sbh)
        if self.spec.norm.sandwich_norm:
            y_sbh, bias = _normalize(self.attention_output_layernorm, y_sbh, bias)
        y_sbh, bias = self._scaled(y_sbh, bias)
        norm = self.post_attention_layernorm
        if self.spec.parallel_residual:
            attended_sbh = self._add(y_sbh, bias, x_sbh, normed_sbh)
            normed_sbh = norm(x_sbh)
        else:
            attended_sbh, normed_sbh = self._add_norm(norm, y_sbh, bias, x_sbh, normed_sbh)
        y_sbh, bias = self.mlp(normed_sbh)
        if self.spec.norm.sandwich_norm:
            y_sbh, bias = _normalize(self.mlp_output_layernorm, y_sbh, bias)
        y_sbh, bias = self._scaled(y_sbh, bias)
        if self.hands_over and not (self.training and self.spec.hidden_dropout):
            residual = self._residual(attended_sbh, normed_sbh)
            return inputs.replace(hidden=residual, pending=(y_sbh, bias))
        total_sbh = self._add(y_sbh, bias, attended_sbh, normed_sbh)
        return inputs.replace(hidden=total_sbh, pending=None)

    def leave_sum_to(self, following: Any) -> None:
        """Leave the last addition to a layer whose first norm adds: a pass less.

        Not derived layers, nor to them: they may read `LayerInput.hidden` alone.
        """
        is_plain = type(self) is type(following) is ParallelTransformerLayerPipe
        # Compiled layers are alike as long as none has an attribute of its own.
        if is_plain and fuses_sum(following.input_layernorm):
            self.hands_over = True

    def attend(self, inputs: LayerInput, normed_sbh: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output of self-attention to `normed_sbh`, and the bias that is left to add."""
        relative = None
        if inputs.relative_table is not None:
            relative = RelativePositions(
                inputs.relative_table,
                max_distance=self.spec.positions.relative_max_distance,
                bidirectional=inputs.attention_span is not None,
            )
        return self.self_attention(
            normed_sbh,
            inputs.positions,
            inputs.attention_span,
            relative,
            shared=inputs.shared,
        )

    def _scaled(self, y_sbh: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a sublayer's output and its bias, times the network's multiplier."""
        factor = self.spec.residual_multiplier
        if factor == 1:
            return y_sbh, bias
        return y_sbh * factor, bias if bias is None else bias * factor

    def _add(self, y_sbh: Tensor, bias: Tensor | None, x_sbh: Tensor, normed_sbh: Tensor) -> Tensor:
        residual = self._residual(x_sbh, normed_sbh)
        dropout = self.spec.hidden_dropout
        return self.kernels.bias_dropout_add(y_sbh, bias, residual, dropout, self.training)

    def _residual(self, x_sbh: Tensor, normed_sbh: Tensor) -> Tensor:
        return normed_sbh.to(x_sbh.dtype) if self.spec.norm.residual_after_norm else x_sbh

    def _add_norm(
        self,
        norm: nn.Module,
        y_sbh: Tensor,
        bias: Tensor | None,
        x_sbh: Tensor,
        normed_sbh: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual with a sublayer's output added, and the next sublayer's input."""
        drops = self.training and self.spec.hidden_dropout > 0
        if drops or not fuses_sum(norm):
            return residual_and_norm(norm, self._add(y_sbh, bias, x_sbh, normed_sbh))
        total_sbh, normed_sbh = norm(self._residual(x_sbh, normed_sbh), y_sbh, bias, sums=True)
        return total_sbh, normed_sbh


class ParallelTransformerDecoderLayerPipe(ParallelTransformerLayerPipe):
    """Decoder layer of an encoder-decoder network: self-attention, cross-attention, MLP.

    Each follows a norm and is added to a residual. `post_attention_layernorm` is before
    cross-attention, `post_inter_attention_layernorm` before the MLP, as in Megatron.

    Shapes: hidden [s, b, h], encoder_hidden [t, b, h] -> hidden [s, b, h], in its dtype.
    Communication: three all-reduces of [s, b, h] over the group forward; backward three, and one
        of [t, b, h].
    Source: arXiv:1910.10683, section 2.1.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int = 1):
        super().__init__(spec, parts, number=number)
        self.inter_attention = ParallelCrossAttention(spec, parts, number=number)
        self.post_inter_attention_layernorm = norm_layer(spec, kernels=parts.kernels).build()

    def forward(self, inputs: LayerInput) -> LayerInput:
        x_sbh, encoder_tbh = inputs.hidden, inputs.encoder_hidden
        if encoder_tbh is None:
            raise ValueError("a decoder's layer needs the output of an encoder")
        x_sbh, normed_sbh = residual_and_norm(self.input_layernorm, x_sbh)
        y_sbh, bias = self.attend(inputs, normed_sbh)
        norm = self.post_attention_layernorm
        x_sbh, normed_sbh = self._add_norm(norm, y_sbh, bias, x_sbh, normed_sbh)
        y_sbh, bias = self.inter_attention(
            normed_sbh, encoder_tbh, inputs.encoder_span, shared=inputs.shared
        )
        norm = self.post_inter_attention_layernorm
        x_sbh, normed_sbh = self._add_norm(norm, y_sbh, bias, x_sbh, normed_sbh)
        y_sbh, bias = self.mlp(normed_sbh)
        return inputs.replace(hidden=self._add(y_sbh, bias, x_sbh, normed_sbh))


def _normalize(norm: nn.Module, y_sbh: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    """Return the norm of a sublayer's output, and that no bias is left to add."""
    return norm(y_sbh if bias is None else y_sbh + bias), None
