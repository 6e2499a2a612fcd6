"""What layers need in generation is asked for at construction: inference assigns them no attribute."""

import ast
from collections.abc import Iterator

import pytest
from source import PACKAGE, files_of

ELSEWHERE = {
    # Weights, once they are loaded, in the layout of the library that multiplies them.
    "inference/runner/onednn_weights.py": {"weight.data", "module.weight", "packed.packed"},
}


def assigned_attributes(text: str) -> Iterator[str]:
    """Yield the attributes that a file assigns or sets, but those of `self`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in {"setattr", "__setattr__", "add_module", "register_module", "set_submodule"}:
                yield name


def test_inference_assigns_no_attribute_of_a_built_layer():
    found = {
        str(file.relative_to(PACKAGE)): {*assigned_attributes(file.read_text())}
        for file in files_of(
            "inference/runner", "inference/engine", "inference/loading", "inference/evaluation"
        )
    }
    assert {file: names for file, names in found.items() if names} == ELSEWHERE


@pytest.mark.parametrize(
    "line",
    [
        "block.self_attention.core_attention = cached",
        "attention.key_value = kept",
        "layer.encoder, other = encoder, None",
        "self.model.calls += [call]",
        "setattr(layer, name, cached)",
        "model.add_module('encoder', encoder)",
    ],
)
def test_an_assignment_to_a_layer_is_found(line):
    assert [*assigned_attributes(line)]
