"""The manifest is read by attributes: its nested dictionaries are compared, or parsed as flags, in full."""

import ast
from collections.abc import Iterator

import pytest
from source import PACKAGE, REPOSITORY, SCRIPTS

from megatron.checkpointing import compare

TREES = ("plan", "config")
MANIFEST = PACKAGE / "checkpointing" / "manifest.py"
PARSERS = {"SavedRun", "missing_plugins", "parse_saved_config", "used_sections"}
"""Functions that take all flags of a run."""

COPIES = {
    "megatron/checkpointing/megatron_lm/convert.py: config",  # with the tokenizer of the importer
    "megatron/inference/loading/model_source.py: config",  # without the layout of the run
}


def indexed(tree: ast.AST) -> Iterator[str]:
    """Yield the reads of a key of `x.plan` or `x.config`."""
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Subscript) or (
            isinstance(node, ast.Attribute) and node.attr in ("get", "pop", "setdefault")
        )
        if is_read and isinstance(node.value, ast.Attribute) and node.value.attr in TREES:
            yield ast.unparse(node)


def unpassed(tree: ast.AST) -> Iterator[str]:
    """Yield the reads of `manifest.plan` and `manifest.config` other than as an argument of its users."""
    passed = {
        id(value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _takes_trees(ast.unparse(call.func))
        for value in (*call.args, *(each.value for each in call.keywords))
    }
    for node in ast.walk(tree):
        is_tree = isinstance(node, ast.Attribute) and node.attr in TREES
        if is_tree and id(node) not in passed:
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner.endswith("manifest"):
                yield node.attr


def _takes_trees(function: str) -> bool:
    return function in PARSERS or hasattr(compare, function)


def parsed() -> dict[str, ast.Module]:
    files = [*PACKAGE.rglob("*.py"), *SCRIPTS]
    return {
        str(file.relative_to(REPOSITORY)): ast.parse(file.read_text(encoding="utf-8"))
        for file in files
        if file != MANIFEST
    }


def test_no_key_of_a_manifest_is_read_outside_of_it() -> None:
    assert [f"{file}: {read}" for file, tree in parsed().items() for read in indexed(tree)] == []


def test_its_dictionaries_go_to_comparisons_and_to_parsers_of_flags() -> None:
    found = {f"{file}: {read}" for file, tree in parsed().items() for read in unpassed(tree)}
    assert found == COPIES


@pytest.mark.parametrize(
    ("text", "reads", "others"),
    [
        ("manifest.plan['model']", 1, 1),
        ("chosen.manifest.plan.get('data', {})", 1, 1),
        ("layout_changes(chosen.manifest.plan, now)", 0, 0),
        ("print(manifest.config)", 0, 1),
        ("manifest.state.iteration", 0, 0),
        ("run.plan.model", 0, 0),
    ],
)
def test_a_read_of_a_dictionary_is_found(text: str, reads: int, others: int) -> None:
    tree = ast.parse(text)
    assert (len([*indexed(tree)]), len([*unpassed(tree)])) == (reads, others)
