"""Hybrid networks of transformers, small ones; part of the tests of several files."""

from transformers import Mamba2Config, NemotronHConfig, Qwen3NextConfig

NEMOTRON = {
    "vocab_size": 30,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 40,
    "ssm_state_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
}
QWEN = {
    "vocab_size": 30,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
CASES = {
    "mamba 2": Mamba2Config(
        vocab_size=30,
        hidden_size=24,
        num_hidden_layers=2,
        num_heads=6,
        head_dim=8,
        state_size=8,
        n_groups=2,
        tie_word_embeddings=True,
    ),
    "nemotron-h": NemotronHConfig(
        **NEMOTRON,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mlp_bias=True,
    ),
    "nemotron-h, experts": NemotronHConfig(
        **NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=28,
        n_routed_experts=4,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
    ),
    "qwen3-next": Qwen3NextConfig(
        **QWEN,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3-next, an MLP": Qwen3NextConfig(
        **QWEN,
        num_hidden_layers=2,
        layer_types=["full_attention", "linear_attention"],
        mlp_only_layers=[1],
        norm_topk_prob=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
}
