"""Names of parameters in checkpoints and module names, each made from the other."""

import pytest
from tiny import tiny_plan

from megatron.checkpointing.hugging_face.network import parameters_of
from megatron.checkpointing.parameter_names import module_name, parameter_name


@pytest.mark.parametrize("tied", [True, False])
def test_module_names_are_those_of_the_network_and_invert(tied):
    flags = [] if tied else ["--untie-embeddings-and-output-weights"]
    spec = tiny_plan("--num-layers", "3", *flags).model
    names = list(parameters_of(spec))
    modules = [module_name(name, spec.num_layers) for name in names]
    assert [parameter_name(m, spec.num_layers, tied=tied) for m in modules] == names
    heads = dict.fromkeys(module.partition(".")[0] for module in modules)
    assert list(heads) == ["embedding", "layers", "final_layernorm"] + ["output_layer"] * (not tied)
    assert {m.split(".")[1] for m in modules if m.startswith("layers")} == {"0", "1", "2"}
