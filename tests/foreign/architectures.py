"""Networks of each architecture, in our flags and in transformers' configs, and what they compute."""

import importlib.util
from pathlib import Path

import gpt_oss
import torch
from checkpoints import spread_network, write_checkpoint
from latent import CASES as LATENT_CASES
from small_families import CASES as SMALL
from tiny import VOCAB_SIZE, batch_of, tiny_plan
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Dots1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron.checkpointing.conversion.network import weights_of

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "convert_checkpoint"
SIZES = """
    --num-layers 2 --hidden-size 24 --num-attention-heads 6 --seq-length 10
    --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 10
"""
ROTARY = "--position-embedding-type rotary"
GROUPS = "--group-query-attention --num-query-groups 2"
LLAMA = f"{ROTARY} --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
STRETCHED = "--use-rope-scaling --rope-scaling-factor 4 --rotary-base 500000"
GEMMAS = "--scale-embedding --apply-layernorm-1p --sandwich-norm"
EXPERTS = f"{LLAMA} --swiglu {UNTIED} {GROUPS} --num-experts 4 --moe-router-topk 2"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
SHARED = "--moe-ffn-hidden-size 20 --moe-shared-expert-intermediate-size"
LATENT = (
    f"{LLAMA} --swiglu {UNTIED} --multi-latent-attention --qk-layernorm --kv-lora-rank 8 "
    "--qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --num-experts 8 --moe-router-topk 4"
)
TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"

OURS = {
    "gpt-oss": ("gpt_oss", f"{gpt_oss.FLAGS} {TENSOR} {PIPELINE}"),
    "gpt2": ("gpt2", "--ffn-hidden-size 40"),
    "gpt2 erf": ("gpt2", f"--gelu erf {UNTIED} {TENSOR}"),
    "gpt2 squared relu": ("gpt2", f"--squared-relu {PIPELINE}"),
    "bloom": ("bloom", f"--position-embedding-type alibi --embed-layernorm {TENSOR} {PIPELINE}"),
    "bloom after norms": (
        "bloom",
        "--position-embedding-type alibi --embed-layernorm "
        "--apply-residual-connection-post-layernorm",
    ),
    "llama 2": ("llama", f"{LLAMA} --swiglu {UNTIED} {GROUPS} {TENSOR} {PIPELINE}"),
    "llama 3": ("llama", f"{LLAMA} --swiglu --kv-channels 6 {GROUPS} {STRETCHED} {TENSOR}"),
    "llama with biases": (
        "llama",
        f"{ROTARY} --normalization RMSNorm --glu-activation geglu "
        f"--rotary-seq-len-interpolation-factor 2 {PIPELINE}",
    ),
    "mistral": ("mistral", f"{LLAMA} --swiglu {UNTIED} {GROUPS} --window-size 6,0 {TENSOR}"),
    "qwen2": ("qwen2", f"{LLAMA} --swiglu --add-qkv-bias {GROUPS} {TENSOR} {PIPELINE}"),
    "qwen3": ("qwen3", f"{LLAMA} --swiglu --qk-layernorm {GROUPS} --kv-channels 8 {PIPELINE}"),
    "qwen3, windows in front": (
        "qwen3",
        f"{LLAMA} --swiglu --qk-layernorm --window-size 5,0 --window-attn-skip-freq 2 {PIPELINE}",
    ),
    "qwen3 window": ("qwen3", f"{LLAMA} --swiglu --qk-layernorm --window-size 5,0 {UNTIED}"),
    "gpt-neox": ("gpt_neox", f"{ROTARY} --rotary-percent 0.5 --gelu erf {UNTIED} {TENSOR}"),
    "pythia": (
        "gpt_neox",
        f"{ROTARY} --rotary-percent 0.5 --gelu erf --parallel-residual {UNTIED} {TENSOR}",
    ),
    "gpt-neox without biases of attention": (
        "gpt_neox",
        f"{ROTARY} --relu --attention-bias off {UNTIED} {TENSOR}",
    ),
    "gemma": (
        "gemma",
        f"{LLAMA} --glu-activation geglu_tanh --scale-embedding --apply-layernorm-1p "
        f"--kv-channels 8 {GROUPS} {TENSOR}",
    ),
    "gemma 2": (
        "gemma2",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --attn-logit-softcapping 2 "
        f"--final-logit-softcapping 3 --query-pre-attn-scalar 5 --kv-channels 8 {GROUPS} "
        f"--window-size 5,0 --window-attn-skip-freq 2 {TENSOR}",
    ),
    "gemma 2, nothing capped, no window": (
        "gemma2",
        f"{LLAMA} --glu-activation geglu {GEMMAS} --attention-bias on {UNTIED} {PIPELINE}",
    ),
    "gemma 3": (
        "gemma3_text",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm --kv-channels 8 {GROUPS} "
        "--window-size 5,0 --window-attn-skip-freq [1,1,0,1] --num-layers 4 --rotary-base 1e6 "
        f"--rotary-local-base 100 --rotary-seq-len-interpolation-factor 8 {TENSOR} {PIPELINE}",
    ),
    "gemma 3, one base, capped logits": (
        "gemma3_text",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm --window-size 5,0 "
        f"--final-logit-softcapping 3 --query-pre-attn-scalar 9 {UNTIED}",
    ),
    "gemma 3, no window": (
        "gemma3_text",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm {STRETCHED}",
    ),
    "llama with yarn": (
        "llama",
        f"{LLAMA} --swiglu {GROUPS} --use-rope-scaling --rope-scaling-type yarn "
        f"--rope-scaling-factor 4 --rope-original-max-position-embeddings 16 {TENSOR}",
    ),
    "gpt2 relu": ("gpt2", f"--relu {UNTIED}"),
    "llama with biases of attention": (
        "llama",
        f"{LLAMA} --swiglu --attention-bias on {GROUPS} {STRETCHED} --rope-low-freq-factor 0.25 "
        f"--rope-high-freq-factor 20 --rope-original-max-position-embeddings 64 {TENSOR}",
    ),
    "qwen3 with biases of attention": (
        "qwen3",
        f"{LLAMA} --swiglu --qk-layernorm --attention-bias on {TENSOR}",
    ),
    "gpt-neox tied": ("gpt_neox", f"{ROTARY} {PIPELINE}"),
    "mixtral": ("mixtral", f"{EXPERTS} --moe-grouped-gemm --moe-ffn-hidden-size 20 {TENSOR}"),
    "mixtral with a window": ("mixtral", f"{EXPERTS} --moe-grouped-gemm --window-size 6,0"),
    "qwen2-moe": (
        "qwen2_moe",
        f"{EXPERTS} --moe-router-pre-softmax --add-qkv-bias {SHARED} 40 --moe-shared-expert-gate "
        f"{TENSOR}",
    ),
    "qwen3-moe": (
        "qwen3_moe",
        f"{EXPERTS} --qk-layernorm --kv-channels 8 --expert-interval 2 --moe-ffn-hidden-size 20 "
        f"--disable-moe-token-dropping --moe-grouped-gemm --moe-router-topk 3 {TENSOR} {PIPELINE}",
    ),
    "deepseek-moe": (
        "dots1",
        f"{EXPERTS} --qk-layernorm {SIGMOID} {SHARED} 40 --moe-layer-freq [0,1] {PIPELINE}",
    ),
    "deepseek-moe with groups": (
        "glm4_moe",
        f"{EXPERTS} --hidden-size 28 --kv-channels 8 --rotary-percent 0.5 --add-qkv-bias "
        f"{SIGMOID} {SHARED} 20 --num-experts 8 "
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
        f"--moe-router-topk-scaling-factor 2.5 {TENSOR}",
    ),
    "deepseek v3": (
        "deepseek_v3",
        f"{LATENT} --q-lora-rank 7 {SIGMOID} {SHARED} 20 --moe-layer-freq [0,1] "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        f"--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 {TENSOR} {PIPELINE}",
    ),
    "deepseek v2": (
        "deepseek_v2",
        f"{LATENT} --moe-router-pre-softmax {SHARED} 40 --moe-router-num-groups 4 "
        f"--moe-router-group-topk 3 --moe-router-group-best 1 {TENSOR}",
    ),
}


def tool(name, *words):
    """Call a tool of convert_checkpoint with these words."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(map(str, words)))


def logits_of(model, tokens):
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with torch.no_grad():
        return model(batch_of(tokens, positions))[..., :VOCAB_SIZE]


def their_logits(folder, tokens, **words):
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **words)
    with torch.no_grad():
        return model.eval()(tokens).logits.float()


def tokens():
    return torch.randint(VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(2))


def rows_with_tokens(weights):
    return {
        name: weight[:VOCAB_SIZE] if name.endswith("word_embeddings.weight") else weight
        for name, weight in weights.items()
    }


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


_SMALL = {"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
_GROUPED = {**_SMALL, "intermediate_size": 40, "num_key_value_heads": 2}
_ROUTED = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_OTHER_LLAMA_3 = {
    **_LLAMA_3,
    "low_freq_factor": 0.5,
    "high_freq_factor": 12.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
THEIRS = {  # every one is compared with ours: see `families.py`
    "gpt2": GPT2Config(vocab_size=30, n_embd=24, n_layer=2, n_head=4, n_positions=40),
    "bloom": BloomConfig(vocab_size=30, hidden_size=24, n_layer=2, n_head=4),
    "llama 3.1": LlamaConfig(**_GROUPED, rope_parameters=_LLAMA_3, tie_word_embeddings=True),
    "llama": LlamaConfig(**_GROUPED, head_dim=8, attention_bias=True, mlp_bias=True),
    "llama, other constants": LlamaConfig(
        **_GROUPED, rope_parameters=_OTHER_LLAMA_3, attention_bias=True
    ),
    "gemma": GemmaConfig(**_GROUPED, head_dim=8),
    "gemma with biases of attention": GemmaConfig(
        **_GROUPED, head_dim=6, attention_bias=True, tie_word_embeddings=False
    ),
    "gemma 2": Gemma2Config(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
    ),
    "gemma 2, nothing capped": Gemma2Config(
        **_GROUPED,
        head_dim=6,
        query_pre_attn_scalar=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * 2,
    ),
    "gemma 3": Gemma3TextConfig(
        **{**_GROUPED, "num_hidden_layers": 7},
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma 3, older keys": Gemma3TextConfig(
        **_GROUPED,
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=11,
        final_logit_softcapping=2.5,
        sliding_window_pattern=2,
        rope_theta=5000.0,
        rope_local_base_freq=70.0,
        tie_word_embeddings=False,
    ),
    "llama, gated by tanh": LlamaConfig(**_GROUPED, hidden_act="gelu_pytorch_tanh"),
    "llama, dynamic": LlamaConfig(
        **_GROUPED,
        max_position_embeddings=25,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "llama, yarn": LlamaConfig(**_GROUPED, head_dim=16, rope_parameters=_YARN),
    "qwen3, yarn of other constants": Qwen3Config(
        **_GROUPED,
        head_dim=16,
        rope_parameters={
            **_YARN,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
    ),
    "gpt-neox, yarn of a part": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=40,
        rope_parameters={**_YARN, "partial_rotary_factor": 0.5, "attention_factor": 1.25},
    ),
    "llama, biases of the MLP": LlamaConfig(**_GROUPED, mlp_bias=True),
    "gpt2 relu": GPT2Config(
        vocab_size=30, n_embd=24, n_layer=2, n_head=4, n_positions=40, activation_function="relu"
    ),
    "gpt-neox without biases of attention": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=40,
        attention_bias=False,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "qwen3 with biases of attention": Qwen3Config(**_GROUPED, head_dim=8, attention_bias=True),
    "mistral": MistralConfig(**_GROUPED, sliding_window=7),
    "mistral without window": MistralConfig(**_GROUPED, sliding_window=None),
    "qwen2": Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=0
    ),
    "qwen2, windows behind": Qwen2Config(
        **{**_GROUPED, "num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
    ),
    "qwen3, windows by kind": Qwen3Config(
        **{**_GROUPED, "num_hidden_layers": 4},
        head_dim=8,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3, a window that no layer has": Qwen3Config(
        **_GROUPED,
        head_dim=12,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
    ),
    "gpt-neox": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=40,
        use_parallel_residual=False,
        rope_parameters={"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    ),
    "mixtral": MixtralConfig(
        **_GROUPED, num_local_experts=3, num_experts_per_tok=2, sliding_window=7
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **_GROUPED,
        **_ROUTED,
        num_experts=5,
        shared_expert_intermediate_size=36,
        mlp_only_layers=[0],
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **{**_GROUPED, "num_hidden_layers": 4},
        **_ROUTED,
        num_experts=5,
        head_dim=8,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        attention_bias=True,
    ),
    "deepseek-moe": Dots1Config(
        **_GROUPED,
        **_ROUTED,
        n_routed_experts=5,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        sliding_window=None,
    ),
    "deepseek-moe with groups": Glm4MoeConfig(
        **{**_GROUPED, "num_hidden_layers": 3},
        moe_intermediate_size=12,
        num_experts_per_tok=4,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        head_dim=8,
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    ),
    **gpt_oss.CASES,
    **LATENT_CASES,
    "pythia": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=96,
        use_parallel_residual=True,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    **SMALL,
}


def export_to(group, folder):
    """Return a function from flags to a network, its checkpoint and the folder of transformers'."""

    def export(flags, *words):
        flags = [*SIZES.split(), *flags.split()]
        plan = tiny_plan(*flags, world_size=4)
        model = spread_network(plan.model, group)
        weights = {name: w.detach() for name, w in weights_of(model).items()}
        saved = write_checkpoint(folder / "saved", weights, *flags)
        tool("to_hf", "--load", saved.parent, "--save", folder / "hf", *words)
        return plan.model, model, saved

    return export
