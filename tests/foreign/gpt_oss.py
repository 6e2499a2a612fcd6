"""Tiny networks of gpt-oss, in transformers' configs and in our flags."""

from transformers import GptOssConfig

SIZES = {
    **{"vocab_size": 30, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16},
}
CASES = {
    "gpt-oss": GptOssConfig(
        **SIZES, sliding_window=4, swiglu_limit=0.7, rope_parameters=YARN, attention_bias=True
    ),
    "gpt-oss without windows and biases of attention": GptOssConfig(
        **SIZES, sliding_window=9, layer_types=["full_attention"] * 2, attention_bias=False
    ),
}
FLAGS = """
    --position-embedding-type rotary --normalization RMSNorm --kv-channels 8
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
    --softmax-type learnable --window-size 4,0 --window-attn-skip-freq 2
    --rotary-base 150000 --use-rope-scaling --rope-scaling-type yarn --rope-scaling-factor 4
    --no-rope-truncation
    --rope-original-max-position-embeddings 16
    --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.7
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 20 --moe-router-linear-bias
    --moe-grouped-gemm
"""
