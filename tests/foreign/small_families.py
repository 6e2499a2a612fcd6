"""Configs of networks that differ from Llama in a few options; part of `architectures.THEIRS`."""

from transformers import Ernie4_5Config, NemotronConfig, Phi3Config, SeedOssConfig

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
}
