"""The MLP with its inner features divided over the tensor-parallel ranks."""

from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.model.layers.activations import activation_of
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.linear import Adapter, ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.rng import RngTracker


class ParallelMLP(nn.Module):
    """Widen, activate, narrow; the output bias is left to the caller.

    Rows of a gated MLP's first weight are grouped [features, {gate, up}], so that the shards of
    any number of ranks, laid side by side, are the whole.

    Args:
        spec: the network; its inner width is a multiple of the group's size.
        parts: what its layers are built with.

    Shapes: x_sbh [s, b, h] -> (y_sbh [s, b, h], bias [h] or None).
    Communication: one all-reduce of [s, b, h] over `group` forward, one backward.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        inner = spec.mlp.inner_features
        self.activate = activation_of(spec.mlp, parts.kernels, spec.own_flags)
        self.dense_h_to_4h = ColumnParallelLinear(
            spec.hidden_size,
            inner,
            has_bias=spec.mlp.linear_bias,
            adds_bias=not parts.kernels.activation_adds_bias,
            adapter=adapter_of(spec, "dense_h_to_4h", parts.rng),
            product=parts.kernels.linear,
            **parts.division,
        )
        self.dense_4h_to_h = RowParallelLinear(
            spec.mlp.ffn_hidden_size,
            spec.hidden_size,
            has_bias=spec.mlp.linear_bias,
            adapter=adapter_of(spec, "dense_4h_to_h", parts.rng),
            product=parts.kernels.linear,
            **parts.division,
        )

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, Tensor | None]:
        inner_sbf = self.dense_h_to_4h(x_sbh)
        # After the product, which releases its weights under ZeRO-3; reading gathers them again.
        bias_f = None if self.dense_h_to_4h.adds_bias else self.dense_h_to_4h.bias
        inner_sbf = self.activate(inner_sbf, bias_f)
        return self.dense_4h_to_h(inner_sbf), self.dense_4h_to_h.bias


def adapter_of(spec: ModelSpec, name: str, rng: RngTracker) -> Adapter | None:
    """Return the adapter of the linear layer `name`; None if it has none.

    Args:
        rng: the stream that differs between tensor-parallel ranks.
    """
    lora = spec.lora
    if lora is None or name not in lora.lora_target_modules:
        return None
    return Adapter(lora.lora_rank, lora.scale, lora.lora_dropout, rng)
