"""An option of a network that an exporter does not name is refused, whatever the option is."""

from dataclasses import dataclass
from typing import Any

import pytest
from golden_files import require_golden
from tiny import tiny_spec, with_changes

from megatron.checkpointing.expressed import not_expressed, plain_values
from megatron.checkpointing.hugging_face.families.registry import all_families
from megatron.checkpointing.megatron_lm import megatron_files
from megatron.checkpointing.megatron_lm.networks import form_of
from megatron.common.errors import WrongCheckpointError
from megatron.common.registry import EXPORTERS
from megatron.config.network.model_spec import ModelSpec, defaults_of, flat, names_of
from megatron.config.networks.architecture import network_named
from megatron.config.objectives import declaration_of
from megatron.extensions.nemo.checkpoints_export import _require_expressed

TRAINING = {
    *("attention_dropout", "hidden_dropout", "fp32_residual", "init", "init_std"),
    *("query_key_layer_scaling", "padded_vocab_in_softmax", "seq_length"),
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


@dataclass(frozen=True, kw_only=True)
class Extended(ModelSpec):
    """A network with an option that is added later."""

    embedding_multiplier: float = 1.0


def refused(problems: Any, name: str) -> bool:
    return any(name in problem for problem in problems)


def of_megatron(spec: ModelSpec) -> list[str]:
    allowed = megatron_files._expressed(spec)
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
        return declaration_of(family.objective).network
    return "bert" if exporter == "NeMo" else "gpt"


def problems_of(exporter: str, multiplier: float | None = None, **changes: Any) -> list[str]:
    """Return what an exporter says of a network that is plain but for `changes`."""
    family, own = EXPORTED[exporter], OF_BERT if exporter == "NeMo" else {}
    own = own | {"architecture": network_of(exporter)}
    spec = tiny_spec(**PLAIN | own | changes)
    if multiplier is not None:
        spec = Extended(**vars(spec), embedding_multiplier=multiplier)
    if family:
        return [*family.problems(spec)]
    return of_nemo(spec) if exporter == "NeMo" else of_megatron(spec)


@pytest.mark.parametrize("exporter", EXPORTED)
def test_a_later_option_is_refused_unless_it_has_its_default(exporter):
    assert problems_of(exporter, 1.0) == problems_of(exporter)
    changed = problems_of(exporter, 12.0)
    assert refused(changed, "embedding_multiplier")


def other_value(name: str) -> Any:
    """Return a value that a field does not have by default."""
    match DEFAULTS[name]:
        case bool() as value:
            return not value
        case int() | float() as value:
            return value + 4
        case str():
            return "retro" if name == "architecture" else "another"
        case ():
            return (("flag", 1),) if name == "own_flags" else (2, 2, 2)


DEFAULTS = {name: defaults_of()[name] for name in flat(tiny_spec()) if name in defaults_of()}
OWNERS = {
    field: name for name in ("bert", "t5", "retro") for field in names_of(network_named(name).part)
}
"""Networks by the fields that only they have."""


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
