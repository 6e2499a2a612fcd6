"""Architecture of transformers as tables: its options, config.json, tensors, and our settings."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from megatron.checkpointing.conversion.network import parameters_of
from megatron.checkpointing.expressed import Allowed, not_expressed, plain_values
from megatron.checkpointing.hugging_face.families.tensor_mapping import (
    Identity,
    OffsetByOne,
    TensorMapping,
)
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.common.errors import CheckpointError
from megatron.config.data.objective import ObjectiveName
from megatron.config.flag_names import flag_setting
from megatron.config.network.experts import MoESpec
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.network.prediction import PredictionSpec
from megatron.config.objectives import declaration_of
from megatron.config.parsing.files import Values
from megatron.config.parsing.near_misses import field_of

HuggingFaceConfig = Mapping[str, Any]
"""config.json with transformers' default values."""


@dataclass(frozen=True)
class Part:
    """A parameter of ours and the transformers tensors with the same elements."""

    ours: str
    theirs: tuple[str, ...]
    mapping: TensorMapping = Identity()


@dataclass(frozen=True)
class Modules:
    """Modules (or tensors) of transformers that together hold the elements of one of ours.

    Args:
        names: of these; a name with {} stands for the modules of all experts, by number.
        mapping: of the elements, for a network.
    """

    names: tuple[str, ...]
    mapping: Callable[[ModelSpec], TensorMapping]


_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors of a layer of multi-token prediction that are those of the network."""

LEFT_OUT = object()
"""What a function of `Family.keys` returns for an entry that makes no difference to a network."""

Table = Mapping[str, str | Modules]
"""Modules of transformers by our module name, or tensors by the name of a tensor that no module of
theirs names alike; a string for one with the same elements."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """An architecture of transformers.

    Args:
        model_type: its name in config.json.
        architecture: its class with the heads of pretraining, or the head of a downstream task.
        auto_class: class of transformers that finds it.
        keys: entries of config.json, without vocabulary and dtype: the ModelSpec field of the same
            value, which has any, and for which there is a flag; a function of the network; or a
            constant.
        values_of: settings for the entries that are not ModelSpec fields. Raises CheckpointError if
            no flag expresses an option.
        needs: allowed values where they differ from `plain_values`.
        network: modules outside the transformer layers.
        layer: modules of a transformer layer, without prefix.
        layers: prefix of a transformer layer; {} is its number, from 0 on.
        module_prefix: first part of module names where it is another than that of tensors in files.
        layers_in_one: how many layers here are one there.
        norms_around_one: whether norm weights are stored minus 1.
        objective: that trains such a network.
        of_network: name of the network in NETWORKS; "" for the objective's.
        computes: the network that transformers computes with these weights, where it differs.
        prediction: modules of a layer of multi-token prediction besides the transformer layer; files
            hold such layers after the last one. {}: there are none.
        ignored: regular expressions of the names of further tensors of multi-token prediction in
            published files, which transformers does not read either.
        script_of: the script that trains such a network; "" for the objective's script.
        values_for: settings that depend on the length of samples.
        absent: modules of `network` that this class does not have; they begin with initial weights.
    """

    model_type: str
    architecture: str
    auto_class: str = "AutoModelForCausalLM"
    keys: Mapping[str, str | bool | Callable[[ModelSpec], Any]]
    values_of: Callable[[HuggingFaceConfig], Values]
    needs: Callable[[ModelSpec], Allowed] = lambda _: {}
    network: Table
    layer: Table
    layers: str
    module_prefix: str = ""
    layers_in_one: int = 1
    norms_around_one: bool = False
    objective: ObjectiveName = "gpt"
    of_network: str = ""
    computes: Callable[[ModelSpec], ModelSpec] = lambda spec: spec
    script_of: Callable[[HuggingFaceConfig], str] = lambda _: ""
    values_for: Callable[[int], Values] = lambda _: {}
    absent: Collection[str] = ()
    prediction: Table = field(default_factory=dict)
    ignored: Collection[str] = ()

    @property
    def network_name(self) -> str:
        """Name of its network in NETWORKS."""
        return self.of_network or declaration_of(self.objective).network

    @property
    def prefix(self) -> str:
        """Prefix of tensor names; some published files omit it."""
        return self.layers.split(".")[0] + "."

    def allowed_values(self, spec: ModelSpec) -> Allowed:
        """Return the values of fields that this architecture expresses."""
        named = (entry for entry in self.keys.values() if isinstance(entry, str))
        return {
            **plain_values(spec),
            "activation": PLAIN_ACTIVATIONS,
            **dict.fromkeys(named),
            **self.needs(spec),
        }

    def problems(self, spec: ModelSpec) -> Iterator[str]:
        """Yield a message for each field of `spec` that this architecture cannot express."""
        for name, value, others in not_expressed(spec, self.allowed_values(spec)):
            known = " or ".join(map(str, others)) or "no such value"
            yield f"{name} is {value}, and it has {known} ({flag_setting(name)})"

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """Build config.json of a network, without vocabulary and dtype."""
        values = flat(spec)
        entries = {
            key: values[entry]
            if isinstance(entry, str)
            else entry(spec)
            if callable(entry)
            else entry
            for key, entry in self.keys.items()
        }
        return {key: entry for key, entry in entries.items() if entry is not LEFT_OUT}

    def values(self, config: HuggingFaceConfig) -> Values:
        """Return the settings of config.json, without those common to all families.

        Raises:
            CheckpointError: no flag expresses an option.
        """
        field_values = {
            field_of(flag_setting(entry)): config[key]
            for key, entry in self.keys.items()
            if isinstance(entry, str) and config.get(key) is not None
        }
        return {**field_values, **self.values_of(config)}

    def without_predictions(self, config: HuggingFaceConfig) -> dict[str, Any]:
        """Return config.json of the same model without layers of multi-token prediction."""
        keys = [key for key, entry in self.keys.items() if entry == "prediction_depths"]
        return {**config, **dict.fromkeys(keys, 0)}

    def left_out(self, spec: ModelSpec) -> Callable[[str], bool]:
        """Return a function from the name of a tensor in files to whether it is left out.

        Left out are `ignored` tensors, layers of multi-token prediction beyond those of `spec`, and
        the copies of the embedding and of the head in all of them.
        """
        before, after = map(re.escape, self.layers.split("{}"))
        layer = re.compile(f"{before}(\\d+){after}(.*)")
        kept = spec.num_layers + spec.part(PredictionSpec).prediction_depths

        def is_left_out(name: str) -> bool:
            if any(re.match(pattern, name) for pattern in self.ignored):
                return True
            match = layer.fullmatch(name) if self.prediction else None
            return match is not None and (int(match[1]) >= kept or match[2] in _COPIES)

        return is_left_out

    def parts(self, spec: ModelSpec) -> Iterator[Part]:
        """Yield all parameters but absent ones, front to back; within a layer as in `layer`.

        Raises:
            CheckpointError: the architecture does not have one of them.
        """
        names = ParameterNames.of(spec)
        parts = (
            self._part(ours, spec, names)
            for ours in parameters_of(spec)
            if names.module(ours).rpartition(".")[0] not in self.absent
        )
        for _, layer in groupby(parts, key=itemgetter(0)):
            yield from (part for *_, part in sorted(layer, key=itemgetter(1)))

    def _part(self, ours: str, spec: ModelSpec, names: ParameterNames) -> tuple[str, int, Part]:
        """Return the prefix of a parameter's layer, its position in the table, and its tensors."""
        module, _, kind = names.module(ours).rpartition(".")
        table, prefix, suffix = self.network, "", f".{kind}"
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            table, prefix = self.layer, self.layers.format(int(number) // self.layers_in_one)
        elif module.startswith("mtp.layers."):
            _, _, depth, module = module.split(".", 3)
            inner = {f"transformer_layer.{own}": theirs for own, theirs in self.layer.items()}
            table = {**self.prediction, **inner}
            prefix = self.layers.format(spec.num_layers + int(depth))
        row = module
        if f"{module}.{kind}" in table:
            row, suffix = f"{module}.{kind}", ""
        if row not in table:
            raise CheckpointError(f"{self.architecture} has no tensor for {ours}")
        theirs = table[row]
        modules = (theirs,) if isinstance(theirs, str) else _names_of(theirs, spec)
        mapping = Identity() if isinstance(theirs, str) else theirs.mapping(spec)
        is_norm_weight = module.endswith("norm") and kind == "weight"
        if is_norm_weight and spec.norm.layernorm_1p and not self.norms_around_one:
            mapping = OffsetByOne()
        part = Part(ours, tuple(f"{prefix}{name}{suffix}" for name in modules), mapping)
        return prefix, [*table].index(row), part


def _names_of(modules: Modules, spec: ModelSpec) -> tuple[str, ...]:
    if "{}" not in modules.names[0]:
        return modules.names
    numbers = range(max(spec.part(MoESpec).num_experts))
    return tuple(name.format(number) for number in numbers for name in modules.names)


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


def activation_name(spec: ModelSpec) -> str:
    """Return transformers' name of the activation function."""
    return ACTIVATIONS[spec.mlp.activation]


def activation_values(function: str, *, gated: bool) -> dict[str, Any]:
    """Return the settings of an activation, by transformers' name of the function.

    Raises:
        CheckpointError: no flag expresses it.
    """
    function = "silu" if function == "swish" else function
    known: dict[str, dict[str, Any]] = {
        **{name: {"gelu": "tanh"} for name in _GELU_TANH},
        "gelu": {"gelu": "erf"},
        "relu": {"relu": True},
        "relu2": {"squared_relu": True},
    }
    if gated:
        known = {
            their: {"glu_activation": our} for our, their in ACTIVATIONS.items() if "glu" in our
        } | {name: {"glu_activation": "geglu_tanh"} for name in _GELU_TANH}
    if function not in known:
        raise CheckpointError(
            f"config.json: there is no flag for the activation {function}; known are "
            f"{', '.join(known)}"
        )
    return known[function]


def bias_values(*, attention: bool, mlp: bool) -> dict[str, Any]:
    """Return the settings of the biases of attention's and the MLP's linear layers."""
    apart = {"attention_bias": "on" if attention else "off"} if attention != mlp else {}
    return {**({} if mlp else {"disable_bias_linear": True}), **apart}
