"""Architecture of transformers: networks it can express, its config.json, its tensors, our flags."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.hugging_face.tensor_mapping import Identity, OffsetByOne, TensorMapping
from megatron.common.errors import CheckpointError
from megatron.config.network.model_spec import ModelSpec

HuggingFaceConfig = Mapping[str, Any]
"""config.json with transformers' default values."""


@dataclass(frozen=True)
class Part:
    """A parameter of ours and the transformers tensors with the same elements."""

    ours: str
    theirs: tuple[str, ...]
    mapping: TensorMapping = Identity()


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of transformers.

    Args:
        model_type: its name in config.json.
        architecture: its causal language model class.
        prefix: of tensor names; some published files omit it.
        needs: allowed values of ModelSpec fields; other fields may vary, except rare ones.
        config: config.json of a network, without vocabulary and dtype.
        parts: all parameters, front to back.
        flags: of pretrain_gpt.py for a config.json, without those common to all families. Raises
            CheckpointError if no flag expresses an option.
    """

    model_type: str
    architecture: str
    prefix: str
    needs: Callable[[ModelSpec], Mapping[str, tuple[Any, ...]]]
    config: Callable[[ModelSpec], dict[str, Any]]
    parts: Callable[[ModelSpec], Iterable[Part]]
    flags: Callable[[HuggingFaceConfig], list[str]]

    def problems(self, spec: ModelSpec) -> Iterator[str]:
        """Yield a message for each field of `spec` that this architecture cannot express."""
        for name, allowed in {**_SELDOM, **self.needs(spec)}.items():
            value = getattr(spec, name)
            if value not in allowed:
                known = " or ".join(str(one) for one in allowed)
                yield f"{name} is {value}, and it has {known} ({_FLAGS[name]})"


_SELDOM = {
    "sandwich_norm": (False,),
    "query_scalar": (0.0,),
    "attention_softcap": (0.0,),
    "logit_softcap": (0.0,),
    "rotary_local_base": (0.0,),
}
"""Allowed values of rare fields, unless an architecture lists its own."""

_FLAGS = {
    "sandwich_norm": "--sandwich-norm",
    "query_scalar": "--query-pre-attn-scalar",
    "attention_softcap": "--attn-logit-softcapping",
    "logit_softcap": "--final-logit-softcapping",
    "rotary_local_base": "--rotary-local-base",
    "position_embedding": "--position-embedding-type",
    "rotary_dim": "--rotary-percent",
    "rotary_interpolation": "--rotary-seq-len-interpolation-factor",
    "rope_scaling": "--use-rope-scaling",
    "window": "--window-size",
    "full_attention_layers": "--window-attn-skip-freq",
    "normalization": "--normalization",
    "embed_layernorm": "--embed-layernorm",
    "scaled_embedding": "--scale-embedding",
    "layernorm_1p": "--apply-layernorm-1p",
    "qk_layernorm": "--qk-layernorm",
    "residual_after_norm": "--apply-residual-connection-post-layernorm",
    "parallel_residual": "--parallel-residual",
    "activation": "--gelu, --glu-activation, --relu, --squared-relu",
    "linear_bias": "--disable-bias-linear",
    "qkv_bias": "--add-qkv-bias, --attention-bias",
    "attention_output_bias": "--attention-bias",
    "num_query_groups": "--num-query-groups",
    "head_dim": "--kv-channels",
    "ffn_hidden_size": "--ffn-hidden-size",
    "hidden_size": "--hidden-size",
    "num_experts": "--num-experts",
}
"""Flag of each field, for messages."""

ACTIVATIONS = {
    "gelu_tanh": "gelu_new",
    "gelu_erf": "gelu",
    "relu": "relu",
    "squared_relu": "relu2",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_pytorch_tanh",
    "reglu": "relu",
    "liglu": "linear",
}
"""Our activation names and transformers' name of the function inside."""

PLAIN_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu", "squared_relu")
"""Ungated activations that transformers has."""

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def activation_flags(function: str, *, gated: bool) -> list[str]:
    """Return the flags of an activation, by transformers' name of the function.

    Raises:
        CheckpointError: no flag expresses it.
    """
    function = "silu" if function == "swish" else function
    flags = {
        **{name: ["--gelu", "tanh"] for name in _GELU_TANH},
        "gelu": ["--gelu", "erf"],
        "relu": ["--relu"],
        "relu2": ["--squared-relu"],
    }
    if gated:
        flags = {
            their: ["--glu-activation", our] for our, their in ACTIVATIONS.items() if "glu" in our
        } | {name: ["--glu-activation", "geglu_tanh"] for name in _GELU_TANH}
    if function not in flags:
        raise CheckpointError(
            f"config.json: there is no flag for the activation {function}; known are "
            f"{', '.join(flags)}"
        )
    return flags[function]


def bias_flags(*, attention: bool, mlp: bool) -> list[str]:
    """Return the flags of the biases of attention's and the MLP's linear layers."""
    apart = ["--attention-bias", "on" if attention else "off"] if attention != mlp else []
    return [*([] if mlp else ["--disable-bias-linear"]), *apart]


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of modules in transformers; {} is the layer number."""

    table: str
    layer: str
    final_norm: str
    head: str = "lm_head"
    positions: str | None = None
    table_norm: str | None = None


def network_parts(
    spec: ModelSpec, names: Names, layer_parts: Callable[[str, str], Iterable[Part]]
) -> Iterator[Part]:
    """Yield every parameter, front to back.

    Args:
        layer_parts: those of the layer with these prefixes, ours and theirs.
    """
    own = "tied_modules.embed." if spec.tied_embeddings else "1."
    yield Part(f"{own}word_embeddings.weight", (f"{names.table}.weight",))
    if names.table_norm:
        yield from norm(spec, f"{own}word_embeddings.norm", names.table_norm)
    if names.positions:
        yield Part(f"{own}position_embeddings.weight", (f"{names.positions}.weight",))
    for layer in range(spec.num_layers):
        yield from layer_parts(f"{3 + layer}.", names.layer.format(layer))
    last = spec.num_layers + 4
    yield from norm(spec, str(last), names.final_norm)
    if not spec.tied_embeddings:
        yield Part(f"{last + 1}.word_embeddings.weight", (f"{names.head}.weight",))


def norm(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Part]:
    """Yield the parameters of a norm."""
    mapping = OffsetByOne() if spec.layernorm_1p else Identity()
    yield Part(f"{ours}.weight", (f"{theirs}.weight",), mapping)
    if spec.normalization == "LayerNorm":
        yield Part(f"{ours}.bias", (f"{theirs}.bias",))


def linear(
    ours: str, theirs: tuple[str, ...], mapping: TensorMapping | None = None, *, has_bias: bool
) -> Iterator[Part]:
    """Yield weight and bias of a linear layer."""
    for kind in ("weight", "bias") if has_bias else ("weight",):
        yield Part(
            f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), mapping or Identity()
        )
