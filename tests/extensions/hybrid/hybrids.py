"""Hybrid networks of transformers, small ones; part of the tests of several files."""

from transformers import Mamba2Config, NemotronHConfig

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
}
