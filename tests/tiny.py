"""The smallest network, command line and plan that tests are built from."""

from typing import Any

from megatron.config.config import Config, parse_config
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.config.network.model_spec import ModelSpec, flat, spec_of
from megatron.config.objectives import plan_objective
from megatron.config.plan.plan import Plan, plan

VOCAB_SIZE = 11

FLAGS = {
    "--num-layers": "2",
    "--hidden-size": "8",
    "--num-attention-heads": "2",
    "--seq-length": "6",
    "--micro-batch-size": "2",
    "--lr": "0.1",
    "--train-iters": "10",
    "--data-path": "corpus",
    "--make-vocab-size-divisible-by": "4",
}

ROTARY: dict[str, Any] = {"position_embedding": "rotary", "rotary_dim": 6}
LLAMA = ROTARY | {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "num_query_groups": 2,
    "linear_bias": False,
    "qkv_bias": False,
    "tied_embeddings": False,
}
GEMMA_2 = LLAMA | {
    "activation": "geglu_tanh",
    "scaled_embedding": True,
    "layernorm_1p": True,
    "tied_embeddings": True,
    "sandwich_norm": True,
    "query_scalar": 3.0,
    "attention_softcap": 1.5,
    "logit_softcap": 4.0,
    "num_layers": 3,
    "window": 4,
    "full_attention_layers": (2,),
}
GEMMA_3 = GEMMA_2 | {
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "qk_layernorm": True,
    "rotary_interpolation": 8.0,
    "rotary_local_base": 100.0,
}
"""Changes of a ModelSpec whose heads are 6 wide."""
GEMMA = (
    *("--use-rotary-position-embeddings", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--glu-activation", "geglu_tanh", "--scale-embedding", "--apply-layernorm-1p"),
    *("--sandwich-norm", "--qk-layernorm", "--query-pre-attn-scalar", "3"),
    *("--attn-logit-softcapping", "2", "--final-logit-softcapping", "3"),
    *("--window-size", "2", "--window-attn-skip-freq", "2", "--rotary-local-base", "100"),
)
"""Flags of all that Gemma 2 and 3 have."""
GPT_OSS = (
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
    *("--use-rotary-position-embeddings", "--normalization", "RMSNorm", "--kv-channels", "4"),
    *("--softmax-type", "learnable", "--window-size", "2", "--window-attn-skip-freq", "2"),
    *("--quick-geglu", "--glu-linear-offset", "1.0", "--activation-func-clamp-value", "0.5"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "8"),
    *("--moe-router-linear-bias", "--moe-grouped-gemm", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--moe-aux-loss-coeff", "0.1"),
)
"""Flags of all that gpt-oss has, by Megatron-LM's names."""
LATENT = (
    *("--multi-latent-attention", "--position-embedding-type", "rope", "--qk-layernorm"),
    *("--q-lora-rank", "10", "--kv-lora-rank", "8", "--qk-head-dim", "4", "--v-head-dim", "3"),
    *("--qk-pos-emb-head-dim", "2", "--normalization", "RMSNorm", "--disable-bias-linear"),
)
"""Flags of latent attention as in DeepSeek-V3."""


def tiny_argv(*flags: str, without: tuple[str, ...] = ()) -> list[str]:
    """Return a command line of the smallest run, `flags` at its end."""
    kept = {flag: value for flag, value in FLAGS.items() if flag not in without}
    return [*(word for pair in kept.items() for word in pair), *flags]


def tiny_config(*flags: str, without: tuple[str, ...] = ()) -> Config:
    """Return the config of the smallest run, `flags` at its end."""
    return parse_config(tiny_argv(*flags, without=without))[0]


def tiny_objective(name: ObjectiveName, *flags: str) -> ObjectivePlan:
    """Return the objective `name` of the smallest run, `flags` at its end."""
    return plan_objective(tiny_config(*flags), name)


def tiny_plan(
    *flags: str,
    world_size: int = 1,
    device: str = "cpu",
    without: tuple[str, ...] = (),
    objective: ObjectiveName = "gpt",
    vocab_size: int = VOCAB_SIZE,
) -> Plan:
    """Return the plan of the smallest run, `flags` at its end."""
    config = tiny_config(*flags, without=without)
    return plan(
        config, world_size=world_size, vocab_size=vocab_size, device=device, objective=objective
    )


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return the smallest network, without dropout."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "head_dim": 4,
        "seq_length": 6,
        "max_position_embeddings": 6,
        "vocab_size": VOCAB_SIZE,
        "padded_vocab_size": 12,
        "position_embedding": "learned",
        "rotary_dim": 0,
        "rotary_base": 10000.0,
        "rotary_interpolation": 1.0,
        "rope_scaling": 1.0,
        "window": 0,
        "query_key_layer_scaling": True,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "layernorm_1p": False,
        "embed_layernorm": False,
        "qk_layernorm": False,
        "residual_after_norm": False,
        "parallel_residual": False,
        "activation": "gelu_tanh",
        "linear_bias": True,
        "qkv_bias": True,
        "tied_embeddings": True,
        "fp32_residual": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init": "normal",
        "init_std": 0.02,
    }
    heads = changes.get("num_attention_heads", sizes["num_attention_heads"])
    return spec_of({"num_query_groups": heads} | sizes | changes)


def with_changes(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a network with other values of fields, whatever part they are in."""
    return spec_of(flat(spec) | changes)


def batch_of(tokens: Any, positions: Any, span: Any = None, **others: Any) -> dict[str, Any]:
    """Return a batch of these fields, without an attention span if there is none."""
    batch = {"tokens": tokens, "positions": positions, "attention_span": span} | others
    return {name: tensor for name, tensor in batch.items() if tensor is not None}


class Shards:
    """A tensor-parallel group as constructors see it."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count
