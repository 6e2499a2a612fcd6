"""Multi-token prediction (MTP): layers behind the network, each of which predicts one token further.

Source: arXiv:2412.19437, section 2.2.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.config.network.prediction import PredictionSpec
from megatron.model.layers.embedding import OutputTable, embed_tokens
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe


class LaterTokens(NamedTuple):
    """Input of `MultiTokenPrediction`.

    Args:
        inputs: output of the last transformer layer.
        embedded: embeddings of the token 1, 2, ... D positions after each, [D, s, b, h].
    """

    inputs: LayerInput
    embedded: Tensor


def embed_later_tokens(layer: OutputTable, inputs: LayerInput, *, spec: ModelSpec) -> LaterTokens:
    """Return the inputs with the embeddings of the tokens that follow each, by a tied table.

    At the end of a sample the first tokens come again; no prediction counts that reads one of them.

    Args:
        inputs: with `tokens`, [b, s] int64, in its batch.

    Communication: one all-reduce of [D b, s, h] over the tensor-parallel ranks forward.
    Randomness: draws from the ordinary stream, as the embedding does.
    """
    tokens_bs = (inputs.batch or {})["tokens"]
    depths = spec.part(PredictionSpec).prediction_depths
    later_bs = torch.cat([tokens_bs.roll(-depth, 1) for depth in range(1, depths + 1)])
    x_bsh = embed_tokens(layer.word_embeddings, later_bs, spec)
    x_bsh = F.dropout(x_bsh, spec.hidden_dropout, layer.training)
    return LaterTokens(inputs, x_bsh.unflatten(0, (depths, -1)).transpose(1, 2).contiguous())


class FinalNormPipe(nn.Module):
    """Final norm of a network with multi-token prediction where nothing is predicted: in generation.

    Shapes: [b, s, h] -> the same.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        self.final_layernorm = norm_layer(spec, kernels=parts.kernels).build()

    def forward(self, x_bsh: Tensor) -> Tensor:
        normed_bsh: Tensor = self.final_layernorm(x_bsh)
        return normed_bsh


class MultiTokenPrediction(FinalNormPipe):
    """Final norm, and the hidden states of all depths of multi-token prediction behind it.

    Each depth reads the hidden states of the one before; the first reads those of the network. The
    head makes logits of all alike, so they are stacked as samples.

    Shapes: hidden [s, b, h] and embedded [D, s, b, h] -> [(1 + D) b, s, h].
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__(spec, parts)
        self.prediction = spec.part(PredictionSpec)
        first = spec.num_layers + 1
        numbers = range(first, first + self.prediction.num_layers)
        self.layers = nn.ModuleList(PredictionLayer(spec, parts, number=n) for n in numbers)

    def forward(self, later: LaterTokens) -> Tensor:  # type: ignore[override]
        hidden = [self.final_layernorm(later.inputs.hidden)]
        for depth, embedded_sbh in enumerate(later.embedded):
            layer = self.layers[0 if self.prediction.prediction_repeated else depth]
            hidden.append(layer(later.inputs, embedded_sbh, hidden[-1]))
        return torch.cat(hidden, 1).transpose(0, 1).contiguous()


class PredictionLayer(nn.Module):
    """A depth of multi-token prediction: norm(block(W cat(norm(embedding), norm(hidden)))).

    The matrix W [h, 2h] is the same on all tensor-parallel ranks.

    Args:
        number: of the transformer layer inside, after those of the network.

    Shapes: inputs with positions and spans, embedded and hidden [s, b, h] -> [s, b, h].
    Communication: as the transformer layer.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts, *, number: int):
        super().__init__()
        self.fp32_residual = spec.fp32_residual
        norm = norm_layer(spec, kernels=parts.kernels)
        self.enorm, self.hnorm = norm.build(), norm.build()
        self.eh_proj = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self.transformer_layer = ParallelTransformerLayerPipe(spec, parts, number=number)
        self.final_layernorm = norm.build()

    def forward(self, inputs: LayerInput, embedded_sbh: Tensor, hidden_sbh: Tensor) -> Tensor:
        both_sb2h = torch.cat([self.enorm(embedded_sbh), self.hnorm(hidden_sbh)], -1)
        x_sbh = self.eh_proj(both_sb2h)
        x_sbh = x_sbh.float() if self.fp32_residual else x_sbh
        output = self.transformer_layer(inputs.replace(hidden=x_sbh))
        normed_sbh: Tensor = self.final_layernorm(output.hidden)
        return normed_sbh
