"""The contract of an optional part of networks, such as experts: a file with its flags, its spec and this.

`ModelSpec` has a field for each part, and `Config` a section for its flags: no other table lists them. Its
checks are in `megatron/config/checks`, and its layers in `megatron/model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

LINEAR_LAYERS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
"""The linear layers of a transformer layer, front to back. The first two also stand for the input and
output projections of what mixes tokens in place of attention."""


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

    @classmethod
    def to_stream(cls, spec: Any) -> "Product":
        """Return the layer of a ModelSpec from the values that attention mixed to the residual stream."""
        return cls(
            inputs=spec.attention.num_attention_heads * spec.value_dim,
            outputs=spec.hidden_size,
            divided="rows",
            has_bias=spec.attention_output_bias,
        )

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


class SpecPart:
    """An optional part of a network: a frozen dataclass, whose defaults, on disk, stand for its absence."""

    section: ClassVar[str]
    """Section of Config with its flags."""

    loss_terms: ClassVar[tuple[str, ...]] = ()
    """Names of the terms of the loss, in addition to its total, that are logged and evaluated."""

    @classmethod
    def of(cls, config: Any) -> "SpecPart | None":
        """Return the part that flags decide; None without it.

        Args:
            config: a `megatron.config.config.Config`.
        """
        raise NotImplementedError

    @property
    def value_dim(self) -> int:
        """Features of a head's values; 0 if they are as many as those of its keys."""
        return 0

    def widths(self, tensor: int) -> Mapping[str, int]:
        """Return the sizes of its matrices on one of `tensor` ranks, by flag or description."""
        return {}

    def attention_form(self, spec: Any) -> AttentionForm | None:
        """Return the attention of every layer of a ModelSpec; None if it is that of other networks."""
        return None
