"""Networks with multi-head latent attention, in transformers' configs."""

from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, MiniCPM3Config

_SMALL = {
    "vocab_size": 30,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 12, "n_shared_experts": 1}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_IN_GROUPS = {**_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_V3 = {**_SMALL, **_IN_GROUPS, "num_experts_per_tok": 4, "num_mtp_layers": 0}

CASES = {
    "deepseek v2": DeepseekV2Config(
        **{**_SMALL, "q_lora_rank": None},
        **{**_EXPERTS, "n_shared_experts": 2},
        n_routed_experts=6,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek v2, groups by their best expert": DeepseekV2Config(
        **_SMALL,
        **_IN_GROUPS,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        attention_bias=True,
    ),
    "deepseek v3": DeepseekV3Config(
        **_V3,
        first_k_dense_replace=1,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek v3, other scales": DeepseekV3Config(
        **{**_V3, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3},
        first_k_dense_replace=0,
        rope_parameters={**_YARN, "mscale_all_dim": 0.4},
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "glm 4 lite": Glm4MoeLiteConfig(
        **_SMALL,
        **_EXPERTS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "sparse", "dense"],
    ),
    "minicpm3": MiniCPM3Config(**_SMALL, scale_emb=3, scale_depth=1.4, dim_model_base=8),
    "minicpm3, longrope": MiniCPM3Config(
        **{**_SMALL, "q_lora_rank": None},
        dim_model_base=None,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 3.5],
            "original_max_position_embeddings": 16,
        },
    ),
}
"""Networks of transformers by name."""
