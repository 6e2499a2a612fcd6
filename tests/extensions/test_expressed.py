"""An option of a network that an exporter does not name is refused, whatever the option is."""

from dataclasses import dataclass
from typing import Any

import pytest
from golden_files import require_golden
from tiny import tiny_spec, with_changes

from megatron.checkpointing.expressed import not_expressed, plain_values
from megatron.checkpointing.hugging_face.families.family import Family
from megatron.checkpointing.hugging_face.families.registry import all_families
from megatron.checkpointing.megatron_lm import written_arguments
from megatron.checkpointing.megatron_lm.networks import form_of
from megatron.common.errors import WrongCheckpointError
from megatron.common.registry import EXPORTERS
from megatron.config.architecture.architecture import network_named
from megatron.config.flag_names import flag_setting
from megatron.config.network.model_spec import ModelSpec, defaults_of, flat, names_of
from megatron.extensions.nemo.checkpoints_export import _require_expressed

TRAINING = {
    *("attention_dropout", "hidden_dropout", "fp32_residual", "init", "init_std"),
    *("query_key_layer_scaling", "padded_vocab_in_softmax", "seq_length", "lora_dropout"),
    "prediction_loss_scale",
}
"""Fields that the logits of a trained network do not depend on."""
PLAIN = {"num_layers": 3, "ffn_hidden_size": 32, "query_key_layer_scaling": True}
OF_BERT = {
    "architecture": "bert",
    "num_token_types": 2,
    "num_outputs": 3,
    "labels": ("a", "b", "c"),
    "head_layers": 2,
}

_MAMBA = {
    **{"mamba_num_heads": 12, "mamba_num_groups": 2, "mamba_head_dim": 4, "mamba_state_dim": 6},
    "linear_conv_kernel_dim": 4,
}
_DELTA_NET = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 12, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "num_layers": 4},
}
_MIXTURE = {
    **{"experts_per_token": 2, "expert_ffn_hidden_size": 12},
    "shared_expert_ffn_hidden_size": 8,
}
OF_HYBRIDS: dict[str, list[dict[str, Any]]] = {
    "Mamba2ForCausalLM": [_MAMBA | {"hybrid_layer_pattern": "MMM"}],
    "NemotronHForCausalLM": [
        _MAMBA | {"hybrid_layer_pattern": "M*-"},
        _MAMBA | _MIXTURE | {"hybrid_layer_pattern": "M*E", "num_experts": (1, 1, 4)},
    ],
    "Qwen3NextForCausalLM": [
        _DELTA_NET | {"hybrid_layer_pattern": "G-*-"},
        _DELTA_NET | _MIXTURE | {"hybrid_layer_pattern": "GE*E", "num_experts": (1, 4, 1, 4)},
    ],
}
"""Patterns of the architectures that are hybrid networks, with sizes that fit each other."""


@dataclass(frozen=True, kw_only=True)
class Extended(ModelSpec):
    """A network with an option that is added later."""

    later_multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Required(ModelSpec):
    """A network with an option that is added later, without a default."""

    later_multiplier: float


def refused(problems: Any, name: str) -> bool:
    return any(name in problem for problem in problems)


def of_megatron(spec: ModelSpec) -> list[str]:
    allowed = written_arguments._expressed(spec)
    return [name for name, *_ in not_expressed(spec, allowed)]


def of_nemo(spec: ModelSpec) -> list[str]:
    try:
        _require_expressed(spec)
    except WrongCheckpointError as error:
        return [str(error)]
    return []


EXPORTED = {each.architecture: each for each in all_families()} | {
    "Megatron-LM": None,
    "NeMo": None,
}


def network_of(exporter: str) -> str:
    """Return the name of the network that an exporter is tried with."""
    family = EXPORTED[exporter]
    if family:
        return family.network_name
    return "bert" if exporter == "NeMo" else "gpt"


def problems_of(exporter: str, multiplier: float | None = None, **changes: Any) -> list[str]:
    """Return what an exporter says of a network that is plain but for `changes`."""
    family, own = EXPORTED[exporter], OF_BERT if exporter == "NeMo" else {}
    own = own | {"architecture": network_of(exporter)} | OF_HYBRIDS.get(exporter, [{}])[0]
    spec = tiny_spec(**PLAIN | own | changes)
    if multiplier is not None:
        spec = Extended(**vars(spec), later_multiplier=multiplier)
    if family:
        return [*family.problems(spec)]
    return of_nemo(spec) if exporter == "NeMo" else of_megatron(spec)


@pytest.mark.parametrize("exporter", EXPORTED)
def test_a_later_option_is_refused_unless_it_has_its_default(exporter):
    assert problems_of(exporter, 1.0) == problems_of(exporter)
    changed = problems_of(exporter, 12.0)
    assert refused(changed, "later_multiplier")


def test_a_later_option_without_a_default_is_refused():
    spec = Required(**vars(tiny_spec()), later_multiplier=1.0)
    names = [name for name, *_ in not_expressed(spec, plain_values(spec))]
    assert names == ["later_multiplier"]


def other_value(name: str, value: Any = None) -> Any:
    """Return a value that a field does not have by default, or another than `value`."""
    match DEFAULTS[name] if value is None else value:
        case bool() as value:
            return not value
        case "normal":
            return "xavier_uniform"
        case int() as value:
            return value + 4
        case float() as value:
            return value + 5
        case str():
            another = {"architecture": "retro", "hybrid_layer_pattern": f"-{str(value)[1:]}"}
            return another.get(name, "another")
        case tuple() as value:
            return (("flag", 1),) if name == "own_flags" else (3,) * len(value) or (2, 2, 2)


DEFAULTS = {name: defaults_of()[name] for name in flat(tiny_spec()) if name in defaults_of()}
OWNERS = {
    field: name
    for name in ("bert", "t5", "retro", "hybrid")
    for field in names_of(network_named(name).part)
}
"""Networks by the fields that only they have."""


_STRETCHED = {"rope_scaling": 2.0, "rope_rule": "yarn"}
NEEDED: dict[str, dict[str, Any]] = {
    "full_attention_layers": {"window": 4},
    **dict.fromkeys(("rope_rule", "rope_original_length"), {"rope_scaling": 2.0}),
    **dict.fromkeys(("rope_low_freq_factor", "rope_high_freq_factor"), {"rope_scaling": 2.0}),
    **dict.fromkeys(("rope_attention_factor", "rope_truncation"), _STRETCHED),
    **dict.fromkeys(
        ("rope_short_factors", "rope_long_factors"), {"rope_scaling": 2.0, "rope_rule": "longrope"}
    ),
}
"""What a field means nothing without."""
_ROTARY = ("rotary_dim", "rotary_base", "rotary_interpolation", "rope_scaling")
_EXPERTS = ("experts_per_token", "expert_ffn_hidden_size")
_APART = (
    *("architecture", "vocab_size", "padded_vocab_size", "tied_embeddings"),
    *("num_outputs", "num_choices", "labels", "head_dropout"),
    "head_activation",  # see Family.computes
)
"""Fields that exports write beside the tables of a family, or leave to training."""
FITTING = {
    "num_layers": ("num_experts",),
    "hidden_size": ("head_dim", "ffn_hidden_size", "mamba_num_heads"),
    "num_attention_heads": ("hidden_size", "num_query_groups"),
    "ffn_hidden_size": ("shared_expert_ffn_hidden_size",),
    "expert_ffn_hidden_size": ("shared_expert_ffn_hidden_size",),
    "head_dim": ("rotary_dim",),
    "linear_bias": ("qkv_bias",),
    "router_groups": ("router_group_best",),
}
"""Fields that others have to fit, with those that may be refused in their place."""
FITTING_IN_HYBRIDS = {**FITTING, "linear_bias": ("qkv_bias", "attention_output_bias")}


def fields_of(spec: ModelSpec) -> list[str]:
    """Return the fields that mean something in a network of this kind."""
    skipped = {*TRAINING, *_APART}
    skipped |= {field for field, owner in OWNERS.items() if owner != spec.architecture}
    skipped |= set() if spec.positions.rotary_dim else {*_ROTARY}
    skipped |= set() if spec.moe else {*_EXPERTS}
    if spec.architecture == "hybrid":
        skipped |= _fields_of_no_layer(spec.own.hybrid_layer_pattern)
    return [field for field in flat(spec) if field not in skipped]


def _fields_of_no_layer(pattern: str) -> set[str]:
    """Return the sizes of layers that a pattern does not have, and its length."""
    skipped = {"num_layers"}
    if "M" not in pattern:
        skipped |= {name for name in OWNERS if name.startswith("mamba_")}
    if "G" not in pattern:
        skipped |= {name for name in OWNERS if name.startswith("linear_")}
        skipped -= {"linear_conv_kernel_dim"} if "M" in pattern else set()
    if pattern == "M" * len(pattern):
        skipped |= {"ffn_hidden_size", "activation", "linear_bias", "max_position_embeddings"}
        skipped |= {"num_attention_heads", "num_query_groups", "head_dim"}
    return skipped


def exportable(family: Family, **sizes: Any) -> ModelSpec:
    """Return the smallest network that an architecture expresses."""
    spec = tiny_spec(**PLAIN | {"architecture": family.network_name} | sizes)
    while found := {
        n: values[0] for n, _, values in not_expressed(spec, family.allowed_values(spec))
    }:
        bias = found.pop("attention_output_bias", spec.attention_output_bias)
        spec = with_changes(spec, **found)
        spec = with_changes(spec, attention_bias_apart=bias != spec.mlp.linear_bias)
    return spec


def files_of(family: Family, spec: ModelSpec) -> Any:
    """Return the entries of config.json, and the tensors."""
    tensors = [(part.theirs, type(part.mapping)) for part in family.parts(spec)]
    return family.config(spec), tensors


SIZED = [
    pytest.param(
        family, sizes, id=f"{family.architecture} {sizes.get('hybrid_layer_pattern', '')}".strip()
    )
    for family in all_families()
    for sizes in OF_HYBRIDS.get(family.architecture, [{}])
]


@pytest.mark.parametrize(("family", "sizes"), SIZED)
def test_each_field_is_in_the_files_or_refused_by_its_flag(family, sizes):
    plain = exportable(family, **sizes)
    assert [*family.problems(plain)] == []
    fitting = FITTING_IN_HYBRIDS if plain.architecture == "hybrid" else FITTING
    lost = []
    for field in fields_of(plain):
        base = with_changes(plain, **NEEDED.get(field, {}))
        if [*family.problems(base)]:
            continue  # what it means nothing without is refused
        value = 1 if field == "num_query_groups" else other_value(field, flat(base)[field])
        spec = with_changes(base, **{field: value})
        messages = [*family.problems(spec)]
        flags = [flag_setting(name) for name in (field, *fitting.get(field, ()))]
        refuses = any(refused(messages, flag) for flag in flags)
        if not refuses and (messages or files_of(family, spec) == files_of(family, base)):
            lost.append((field, messages))
    assert lost == []


@pytest.mark.parametrize("exporter", ["Megatron-LM", "NeMo"])
@pytest.mark.parametrize("field", DEFAULTS)
def test_what_other_files_lack_is_refused_by_its_flag(field, exporter):
    if OWNERS.get(field, network_of(exporter)) != network_of(exporter) or field == "architecture":
        return
    own = OF_BERT if exporter == "NeMo" else {"architecture": "gpt"}
    spec = tiny_spec(**PLAIN | own | {field: other_value(field)})
    if exporter == "NeMo":
        messages = of_nemo(spec)
    else:
        messages = [*written_arguments.writing_problems(spec, 1, 1, ("--tensor", "--pipeline"))]
    accepted = not refused(problems_of(exporter, **{field: other_value(field)}), field)
    assert accepted or refused(messages, flag_setting(field))


@pytest.mark.parametrize("field", DEFAULTS)
def test_every_field_is_refused_by_the_plain_exporter(field):
    """A format that names nothing refuses all but what training alone or another field decides."""
    architecture = {"architecture": OWNERS.get(field, "gpt")}
    spec = tiny_spec(**architecture | {field: other_value(field)})
    decided_by = {
        "attention_bias_apart": "attention_output_bias",
        "full_attention_layers": None,  # of layers with a window
        "experts_per_token": None,  # of layers with experts
        "expert_ffn_hidden_size": None,
        **dict.fromkeys(TRAINING),
    }
    names = [name for name, *_ in not_expressed(spec, plain_values(spec))]
    expected = decided_by.get(field, field)
    assert (expected in names) if expected else names == []


def test_which_options_each_exporter_accepts():
    """Of each field with a default, whether another value passes."""
    lines = []
    for exporter in EXPORTED:
        accepted = [
            field
            for field in DEFAULTS
            if field != "architecture"
            and OWNERS.get(field, network_of(exporter)) == network_of(exporter)
            and not refused(problems_of(exporter, **{field: other_value(field)}), field)
        ]
        lines.append(f"{exporter}: {' '.join(accepted)}")
    require_golden("exported_options.txt", "\n".join(lines) + "\n")


def test_every_field_has_values_in_a_plain_network():
    spec = tiny_spec()
    assert flat(spec).keys() <= plain_values(spec).keys()
    assert [*not_expressed(spec, plain_values(spec))] == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"attention": "mine"}, "attention"),
        ({"activation": "mine"}, "activation"),
        ({"position_embedding": "mine"}, "position_embedding"),
        ({"normalization": "mine"}, "normalization"),
        ({"own_flags": (("f", 1),)}, "own_flags"),
        ({"scaled_embedding": True}, "scaled_embedding"),
        ({"attention_bias_apart": True}, "attention_bias_apart"),
        ({"rope_attention_factor": 2.0}, "rope_attention_factor"),
        ({"num_outputs": 2}, "num_outputs"),
    ],
)
def test_parts_of_plugins_and_what_megatron_lacks_are_refused_there(changes, name):
    assert of_megatron(tiny_spec()) == []
    assert of_megatron(tiny_spec(**changes)) == [name]


def test_megatron_s_forms_name_fields_of_their_networks():
    names = flat(tiny_spec()).keys()
    for network in ("gpt", "bert", "t5", "retro"):
        assert {*form_of(network).expresses} <= names


def test_nemo_has_a_bert_of_fixed_form():
    spec = tiny_spec(**OF_BERT, norm_epsilon=1e-5)
    assert of_nemo(spec) == []
    for changes in ({"ffn_hidden_size": 16}, {"activation": "swiglu"}, {"qk_layernorm": True}):
        assert refused(of_nemo(with_changes(spec, **changes)), next(iter(changes)))


def test_these_exporters_are_the_ones_tested():
    assert {*EXPORTERS} == {"transformers", "nemo", "nemo-autoresume", "safetensors"}
