"""The linear layers and features of a layer's attention: what counts, estimates and checks need of it."""

from megatron.config.network.model_spec import ModelSpec
from megatron.config.network.spec_part import AttentionForm, Product


def attention_form(spec: ModelSpec) -> AttentionForm:
    """Return the attention of every layer of a network."""
    forms = (part.attention_form(spec) for part in spec.parts)
    return next(filter(None, forms), None) or _fused(spec)


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
            Product.to_stream(spec),
        ),
        norms=(attention.head_dim,) * 2 if spec.norm.qk_layernorm else (),
        value_features=queries,
        received=width,
        cached=2 * keys,
    )
