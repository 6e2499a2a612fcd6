"""How folders of the package stand to each other."""

import re
from pathlib import Path

import pytest
from source import PACKAGE, import_graph, imported_modules, reached


def circles(package: Path) -> set[frozenset[str]]:
    """Return the sets of folders of which each reaches all others by the imports of its modules."""
    graph: dict[str, set[str]] = {}
    for module, targets in import_graph(package).items():
        here = _folder(module)
        # Imports of extensions by the core are counted by themselves.
        down = {each for each in targets if _is_extension(module) or not _is_extension(each)}
        graph.setdefault(here, set()).update(map(_folder, down))
    reach = {folder: reached(graph, *graph[folder]) for folder in graph}
    found = {frozenset(b for b in reach[a] if a in reach[b]) | {a} for a in graph}
    return {circle for circle in found if len(circle) > 1}


def _folder(module: str) -> str:
    return ".".join(module.split(".")[1:-1])


def _is_extension(module: str) -> bool:
    return module.split(".")[1:2] == ["extensions"]


def imports_of_extensions(package: Path) -> list[str]:
    """Return 'file: module' for every import of an extension by a module of the core."""
    return [
        f"{file.relative_to(package)}: {name}"
        for file in sorted(package.rglob("*.py"))
        if file.relative_to(package).parts[0] != "extensions"
        for name in imported_modules(file)
        if f"{name}.".startswith(f"{package.name}.extensions.")
    ]


def test_folders_import_in_one_direction():
    assert circles(PACKAGE) == set()


def test_the_core_imports_no_extension():
    assert imports_of_extensions(PACKAGE) == []


NAMING = {
    "common/commands.py",  # programs that are verbs
    "checkpointing/resharding/unpickle.py",  # packages whose objects are not built
    "config/flag_names.py",
    "config/foreign_flags/network.py",
    "config/network/model_spec.py",
    *("config/tools/checkpoint_tools.py", "config/tools/hugging_face.py"),  # values of --model-type
}
"""Files of the core that may name a network or a program of an extension."""

NAMES = re.compile(
    r"(?<![a-z])(?:retro|t5|squad|nemo(?!tron)|bert(?!WordPiece|Tokenizer|Normalizer|PreTokenizer))",
    re.I,
)


def test_the_core_does_not_speak_of_extensions():
    core = (file for file in PACKAGE.rglob("*.py") if PACKAGE / "extensions" not in file.parents)
    named = {str(f.relative_to(PACKAGE)) for f in core if NAMES.search(f.read_text("utf-8"))}
    assert named <= NAMING


@pytest.fixture
def made(tmp_path):
    """Return a function that writes {file: text} into a package and returns its folder."""

    def write(files):
        package = tmp_path / "megatron"
        for name, text in files.items():
            file = package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            (file.parent / "__init__.py").touch()
        return package

    return write


def test_a_circle_of_folders_is_found_without_one_of_modules(made):
    package = made(
        {
            "a/one.py": "from megatron.b.one import x",
            "a/two.py": "x = 1",
            "b/one.py": "def f():\n    from megatron.c.one import x",
            "c/one.py": "import megatron.a.two",
            "d/one.py": "from megatron.a import one",
        }
    )
    assert circles(package) == {frozenset("abc")}


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("config/plan/plan.py", "from megatron.extensions.bert.network import Bert"),
        ("api.py", "from megatron import extensions"),
        ("training/run.py", "def f():\n    import megatron.extensions.tasks"),
    ],
)
def test_an_import_of_an_extension_is_found(made, importer, line):
    package = made({importer: line, "extensions/t5/network.py": "import megatron.extensions.bert"})
    assert len(imports_of_extensions(package)) == 1
