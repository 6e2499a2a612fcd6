"""The form of each network in Megatron-LM's files: which files hold it, names, settings, arguments."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megatron.checkpointing.megatron_lm.distributed_files import Weight
from megatron.common.registry import NETWORKS, import_dotted
from megatron.config.architecture.architecture import network_named
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.parsing.files import Values

Renamed = tuple[tuple[str, str], ...]
"""Patterns of parameter names, and their replacements."""

OF_LAYERS: Renamed = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.post_attention_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.query\.", ".self_attention.linear_q_proj."),
    (r"\.self_attention\.(q|kv)_(down|up)\.", r".self_attention.linear_\1_\2_proj."),
    (r"\.self_attention\.sinks$", ".self_attention.core_attention.softmax_offset"),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.(.*)dense_h_to_4h\.", r".mlp.\1linear_fc1."),
    (r"\.mlp\.(.*)dense_4h_to_h\.", r".mlp.\1linear_fc2."),
)
"""From module names of a layer to megatron.core's in distributed files."""


class Form:
    """The form of a network in Megatron-LM's files; subclasses override a GPT's form."""

    renamed: ClassVar[Renamed] = ((r"^(encoder|transformer|decoder)\.", ""),)
    """Prefixes of parameter names there -> prefixes of version 3; "" for an only stack."""

    distributed: ClassVar[Renamed] = ()
    """Module names -> names in megatron.core's distributed files; () if none are written."""

    has_experts: ClassVar[bool] = False
    """Whether its layers in distributed files may have experts."""

    expresses: ClassVar[tuple[str, ...]] = ()
    """Fields of ModelSpec that its files express in addition to a GPT's."""

    def recognises(self, names: Collection[str]) -> bool:
        """Whether parameters of these names belong to this network and to no other."""
        return False

    def values(
        self, modules: Mapping[str, Sequence[Weight]], layers: int, arguments: Mapping[str, Any]
    ) -> Values:
        """Return its settings in addition to a GPT's.

        Args:
            modules: shards of its parameters, by module name.
            layers: of a decoder after an encoder.
            arguments: those in the files.
        """
        return {}

    def arguments(self, spec: ModelSpec, pipeline: int) -> dict[str, Any]:
        """Return its arguments in addition to a GPT's.

        Args:
            pipeline: stages that are written.
        """
        return {}

    def problems(self, spec: ModelSpec, *, pipeline: int, flag: str) -> Iterator[str]:
        """Yield why Megatron-LM cannot load or express a network, in addition to a GPT's problems.

        Args:
            flag: name of the flag for `pipeline`.
        """
        return iter(())

    def distributed_names(self, module: str, spec: ModelSpec) -> list[str]:
        """Return the names of a parameter in distributed files: several where megatron.core stores it twice.

        Args:
            module: its name in `ParameterNames`.
        """
        for pattern, other in self.distributed:
            module = re.sub(pattern, other, module)
        return [module]

    def flat_name(self, module: str) -> str:
        """Return the only key of a parameter in a state dict without levels; "" where there are levels.

        Args:
            module: its name in `ParameterNames`.
        """
        return ""


class GPTForm(Form):
    """GPT, and any network that no other form recognises."""

    distributed: ClassVar[Renamed] = (
        (r"^(layers|final_layernorm)\.", r"decoder.\1."),
        *OF_LAYERS,
        (r"\.mlp\.experts\.", ".mlp.experts.experts."),
        (r"\.mlp\.shared_expert_gate\.weight$", ".mlp.shared_experts.gate_weight"),
    )
    has_experts = True

    def values(
        self, modules: Mapping[str, Sequence[Weight]], layers: int, arguments: Mapping[str, Any]
    ) -> Values:
        """Return whether routers have a bias, which no argument says."""
        has_bias = any(name.endswith(".router.bias") for name in modules)
        return {"moe_router_linear_bias": True} if has_bias else {}

    def distributed_names(self, module: str, spec: ModelSpec) -> list[str]:
        """Return the name; for norms that Transformer Engine alone fuses both names."""
        (name,) = super().distributed_names(module, spec)
        layer, norm, rest = name.partition(".mlp.linear_fc1.layer_norm_")
        if norm and (spec.latent or spec.experts_of(_number(layer, spec)) > 1):
            return [name, f"{layer}.pre_mlp_layernorm.{rest}"]
        if not spec.latent:
            return [name]
        name = name.replace(".self_attention.linear_qkv.layer_norm_", ".input_layernorm.")
        fused = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", name)
        return [*dict.fromkeys((name, fused))]


def _number(layer: str, spec: ModelSpec) -> int:
    """Return the number, from 1 on, of a layer's name; layers that predict are behind the last."""
    last = layer.rpartition(".")[2]
    return int(last) + 1 if last.isdecimal() else spec.num_layers + 1


def form_of(network: str) -> Form | None:
    """Return the form of the network of that name; None if these files cannot hold it."""
    found = network_named(network).megatron_in
    return import_dotted(found)() if found else None


def identify_network(names: Collection[str]) -> tuple[str, Form]:
    """Return the name and the form of the network that parameters of these names belong to."""
    forms = ((name, form) for name in NETWORKS.with_extensions() if (form := form_of(name)))
    return next(
        ((name, form) for name, form in forms if form.recognises(names)), ("gpt", GPTForm())
    )


def num_decoder_layers(spec: ModelSpec) -> int:
    """Return the layers of a decoder after an encoder; 0 if there is none."""
    return int(flat(spec)["num_decoder_layers"])


def first_decoder_stage(spec: ModelSpec, pipeline: int) -> int:
    """Return the first stage of a decoder after an encoder, nearest the middle; 0 if none fits."""
    decoder_layers = num_decoder_layers(spec)
    fitting = [
        stage
        for stage in range(1, pipeline)
        if decoder_layers
        and spec.num_layers % stage == 0
        and decoder_layers % (pipeline - stage) == 0
    ]
    return min(fitting, key=lambda stage: abs(2 * stage - pipeline), default=0)
