"""GPT-2: learned positions, LayerNorm, a plain MLP, linear layers kept as [in, out]."""

from operator import attrgetter

from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    activation_name,
    activation_values,
)
from megatron.checkpointing.hugging_face.families.tensor_mapping import (
    StackedTransposed,
    Transposed,
)
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parsing.files import Values


def _values_of(config: HuggingFaceConfig) -> Values:
    activation = activation_values(config["activation_function"], gated=False)
    return {"position_embedding_type": "learned_absolute", **activation}


def _qkv(spec: ModelSpec) -> StackedTransposed:
    attention = spec.attention
    return StackedTransposed(heads=attention.num_attention_heads, head_dim=attention.head_dim)


def _transpose(_: ModelSpec) -> Transposed:
    return Transposed()


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_inner": "ffn_hidden_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        # Read by converters of other programs.
        "n_ctx": attrgetter("positions.max_position_embeddings"),
        "activation_function": activation_name,
        "layer_norm_epsilon": "norm_epsilon",
        "attn_pdrop": "attention_dropout",
        "embd_pdrop": attrgetter("hidden_dropout"),
        "resid_pdrop": "hidden_dropout",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    values_of=_values_of,
    network={
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    },
    layer={
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attention.query_key_value": Modules(("attn.c_attn",), _qkv),
        "self_attention.dense": Modules(("attn.c_proj",), _transpose),
        "mlp.dense_h_to_4h": Modules(("mlp.c_fc",), _transpose),
        "mlp.dense_4h_to_h": Modules(("mlp.c_proj",), _transpose),
    },
    layers="transformer.h.{}.",
)
