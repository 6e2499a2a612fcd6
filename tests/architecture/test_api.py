"""The page of the public API lists what exists, and the pages of extensions every door."""

import ast
import re
from importlib import import_module
from inspect import isclass, isfunction

import pytest
from source import PACKAGE, REPOSITORY

from megatron import api
from megatron.common import registry
from megatron.config.objectives import Declaration

DOCS = REPOSITORY / "docs"
_FIRST_CELL = re.compile(r"^\| ([^|]+) \|", re.MULTILINE)
_NAME = re.compile(r"`([\w.]+)(?:\(.*?\))?`")
_DECLARED = re.compile(r"declarations_in\(\s*\"\w+\",\s*\"(\w+)\"")


def names_in(page: str, heading: str = "") -> list[str]:
    """Return the names in the first columns of a page's tables, or of those below a heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading:
        text = text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return [name for cell in _FIRST_CELL.findall(text) for name in _NAME.findall(cell)]


LISTED = [name for name in names_in("api.md") if name.startswith("megatron.")]


def test_the_first_table_is_the_module() -> None:
    assert sorted(names_in("api.md", "## `megatron.api`")) == sorted(api.__all__)


def test_names_are_listed_once() -> None:
    assert len(LISTED) == len({*LISTED}) > 40


@pytest.mark.parametrize("name", [*LISTED, *(f"megatron.api.{name}" for name in api.__all__)])
def test_a_public_name_exists_and_says_what_it_is(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(import_module(module), attribute)
    assert found.__doc__ or not (isclass(found) or isfunction(found))


def test_each_registry_has_its_contract_on_a_page() -> None:
    registries = {
        name for name, each in vars(registry).items() if isinstance(each, registry.Registry)
    }
    text = "".join((DOCS / page).read_text("utf-8") for page in ("extending.md", "architecture.md"))
    assert {name for name in registries if f"`{name}`" not in text} == set()


def test_what_modules_of_extensions_may_declare_is_on_the_page() -> None:
    page = (DOCS / "architecture.md").read_text("utf-8").partition("\n## An extension\n")[2]
    table = page.partition("\n## ")[0]
    declared = {
        name
        for file in PACKAGE.rglob("*.py")
        for name in _DECLARED.findall(file.read_text(encoding="utf-8"))
    }
    assert declared >= {"INTERFACE", "OF_NETWORK", "settings_of"}
    assert {name for name in declared if f"`{name}`" not in table} == set()


def test_each_hook_of_a_declaration_is_on_the_page() -> None:
    own = {name for name in vars(Declaration) if not name.startswith("_")}
    fields = {
        node.target.id for node in ast.walk(_declaration()) if isinstance(node, ast.AnnAssign)
    }
    assert {*names_in("extending.md", "## A declaration")} == own | fields


def _declaration() -> ast.ClassDef:
    tree = ast.parse((PACKAGE / "config" / "objectives.py").read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Declaration")
    return found
