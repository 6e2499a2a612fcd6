"""Names of parameters in checkpoints and module names, each made from the other."""

import pytest
from tiny import tiny_plan, with_changes

from megatron.checkpointing.conversion.network import parameters_of
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.config.network.model_spec import flat


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "heads"),
    [
        ("gpt", ["embedding", "layers", "final_layernorm"]),
        ("bert", ["embedding", "layers", "final_layernorm", "lm_head", "pooler", "binary_head"]),
        ("t5", ["embedding", "layers", "final_layernorm", "decoder", "lm_head"]),
    ],
)
def test_module_names_are_those_of_the_network_and_invert(architecture, heads, tied):
    spec = with_changes(
        tiny_plan("--num-layers", "3").model,
        architecture=architecture,
        tied_embeddings=tied,
        num_token_types=2 if architecture == "bert" else 0,
        binary_head=architecture == "bert",
        num_decoder_layers=2 if architecture == "t5" else 0,
    )
    own = ParameterNames.of(spec)
    names = list(parameters_of(spec))
    modules = [own.module(name) for name in names]
    assert [own.parameter(module) for module in modules] == names
    found = {module.partition(".")[0] for module in modules}
    assert found == {*heads, *([] if tied else ["output_layer"])}
    assert {m.split(".")[1] for m in modules if m.startswith("layers")} == {"0", "1", "2"}
    layers = {".".join(m.split(".")[:3]) for m in modules if m.startswith("decoder.layers")}
    assert len(layers) == flat(spec)["num_decoder_layers"]


def test_relative_positions_have_the_names_of_megatron_core():
    spec = with_changes(
        tiny_plan("--num-layers", "3").model,
        architecture="t5",
        num_decoder_layers=2,
        position_embedding="relative",
        relative_buckets=8,
        relative_max_distance=9,
    )
    own = ParameterNames.of(spec)
    modules = {own.module(name) for name in parameters_of(spec)}
    table = "relative_pos_emb.relative_attention_bias.weight"
    assert {f"encoder_{table}", f"decoder_{table}"} <= modules
