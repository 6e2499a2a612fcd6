"""The linear layers and features of a layer's attention: what counts, estimates and checks need of it."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.network.latent import LatentSpec
from megatron.config.network.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Product:
    """A linear layer, with a matrix [outputs, inputs].

    Args:
        divided: what tensor-parallel ranks divide: outputs (columns), inputs (rows), or nothing.
    """

    inputs: int
    outputs: int
    divided: Literal["columns", "rows", ""] = ""
    has_bias: bool = False

    @property
    def matrix(self) -> int:
        """Weights of the matrix on all ranks."""
        return self.inputs * self.outputs

    def shape(self, tensor: int) -> tuple[int, int]:
        """Return inputs and outputs on one of `tensor` ranks."""
        inputs, outputs = self.inputs, self.outputs
        rows, columns = (self.divided == kind for kind in ("rows", "columns"))
        return inputs // (tensor if rows else 1), outputs // (tensor if columns else 1)

    def weights(self, tensor: int) -> int:
        """Return the weights on one of `tensor` ranks."""
        inputs, outputs = self.shape(tensor)
        return inputs * outputs + (outputs if self.has_bias else 0)


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """Attention of a layer.

    Args:
        products: its linear layers, front to back.
        norms: widths of its norms.
        value_features: features of the values that are mixed, over all heads.
        received: features of a token that tensor-parallel ranks exchange in front of divided layers.
        latents: features of a token's latents, which every tensor-parallel rank computes.
        expanded: features of the product with keys and values that are composed to keys, over all heads.
        cached: features of a token that generation keeps, over all ranks.
    """

    products: tuple[Product, ...]
    norms: tuple[int, ...]
    value_features: int
    received: int
    latents: int = 0
    expanded: int = 0
    cached: int


def attention_form(spec: ModelSpec) -> AttentionForm:
    """Return the attention of every layer of a network."""
    return _latent(spec, spec.latent) if spec.latent else _fused(spec)


def _fused(spec: ModelSpec) -> AttentionForm:
    attention, width = spec.attention, spec.hidden_size
    queries, keys = attention.query_features, attention.key_features
    return AttentionForm(
        products=(
            Product(
                inputs=width,
                outputs=queries + 2 * keys,
                divided="columns",
                has_bias=attention.qkv_bias,
            ),
            _output(spec),
        ),
        norms=(attention.head_dim,) * 2 if spec.norm.qk_layernorm else (),
        value_features=queries,
        received=width,
        cached=2 * keys,
    )


def _latent(spec: ModelSpec, latent: LatentSpec) -> AttentionForm:
    attention, width = spec.attention, spec.hidden_size
    heads, queries = attention.num_attention_heads, attention.query_features
    rank, of_queries = latent.kv_lora_rank, latent.q_lora_rank
    turned = latent.qk_pos_emb_head_dim
    plain, values = heads * (attention.head_dim - turned), heads * latent.v_head_dim
    bias = attention.qkv_bias
    down = (Product(inputs=width, outputs=of_queries, has_bias=bias),) if of_queries else ()
    norms = ((of_queries,) if of_queries else ()) + (rank,)
    return AttentionForm(
        products=(
            *down,
            Product(inputs=of_queries or width, outputs=queries, divided="columns"),
            Product(inputs=width, outputs=rank + turned, has_bias=bias),
            Product(inputs=rank, outputs=plain + values, divided="columns"),
            _output(spec),
        ),
        norms=norms if spec.norm.qk_layernorm else (),
        value_features=values,
        received=(of_queries or width) + rank + turned,
        latents=of_queries + rank + turned,
        expanded=plain,
        cached=latent.cached_features,
    )


def _output(spec: ModelSpec) -> Product:
    """Return the layer from the mixed values to the residual stream."""
    return Product(
        inputs=spec.attention.num_attention_heads * spec.value_dim,
        outputs=spec.hidden_size,
        divided="rows",
        has_bias=spec.attention_output_bias,
    )
