"""Configs of networks that differ from Llama in a few options; part of `architectures.THEIRS`."""

from transformers import (
    Ernie4_5Config,
    GraniteConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    SeedOssConfig,
    SmolLM3Config,
)

SIZES = {
    "vocab_size": 30,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 40,
    "num_key_value_heads": 2,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
PARTLY_TURNED = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.1, 1.5, 2.5, 3.0],
    "long_factor": [1.5, 4.0, 9.0, 20.0],
}
CASES = {
    "seed-oss": SeedOssConfig(**SIZES, head_dim=6),
    "seed-oss, biases of outputs": SeedOssConfig(
        **SIZES, head_dim=8, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "ernie": Ernie4_5Config(**SIZES, head_dim=8),
    "ernie with biases": Ernie4_5Config(
        **SIZES, head_dim=6, use_bias=True, tie_word_embeddings=False
    ),
    "phi3": Phi3Config(**SIZES, **TOKENS, sliding_window=7),
    "phi3, a part of each head": Phi3Config(
        **SIZES | {"hidden_size": 32, "num_attention_heads": 4},
        **TOKENS,
        rope_parameters=PARTLY_TURNED,
        tie_word_embeddings=True,
    ),
    "phi3, longrope beyond its length": Phi3Config(
        **SIZES | {"hidden_size": 32, "num_attention_heads": 4},
        **TOKENS,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=LONGROPE,
    ),
    "phi3, longrope within its length": Phi3Config(
        **SIZES | {"hidden_size": 64, "num_attention_heads": 4},
        **TOKENS,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5},
    ),
    "nemotron": NemotronConfig(**SIZES, **TOKENS, head_dim=8),
    "nemotron with biases": NemotronConfig(
        **SIZES,
        **TOKENS,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        hidden_act="gelu",
        tie_word_embeddings=True,
    ),
    "smollm3": SmolLM3Config(**SIZES, **TOKENS, no_rope_layers=[1, 0]),
    "smollm3 with windows": SmolLM3Config(
        **SIZES | {"num_hidden_layers": 4},
        **TOKENS,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
    ),
    "granite with biases": GraniteConfig(
        **SIZES,
        attention_multiplier=0.015625,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "olmo 2": Olmo2Config(**SIZES, **TOKENS),
    "olmo 2 with biases": Olmo2Config(
        **SIZES, **TOKENS, attention_bias=True, tie_word_embeddings=True
    ),
    "olmo 3": Olmo3Config(**SIZES | {"num_hidden_layers": 4}, **TOKENS, sliding_window=5),
    "olmo 3, stretched": Olmo3Config(
        **SIZES,
        **TOKENS,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "olmo 3, no window": Olmo3Config(
        **SIZES, **TOKENS, layer_types=["full_attention"] * 2, tie_word_embeddings=True
    ),
}
