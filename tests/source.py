"""What the source files say, without running them."""

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "megatron"
SCRIPTS = [
    *sorted({*REPOSITORY.glob("*.py")} - {REPOSITORY / "setup.py"}),
    *(
        file
        for folder in ("tasks", "tools", "benchmarks", "examples/detxoify_lm")
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
    ),
]


def module_name(file: Path, package: Path = PACKAGE) -> str:
    """Return the dotted name of `file`."""
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_modules(file: Path) -> tuple[str, ...]:
    """Return the dotted names that `file` imports, those inside functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write the import absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def import_graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Return the modules of `package` that each of its modules imports; folders are left out."""
    files = {module_name(file, package): file for file in package.rglob("*.py")}
    return {
        name: {
            target
            for module in imported_modules(file)
            for target in (module, module.rpartition(".")[0])
            if target in files and files[target].name != "__init__.py"
        }
        for name, file in files.items()
    }


def reached(graph: Mapping[str, Collection[str]], *starts: str) -> set[str]:
    """Return `starts` and all that they reach in `graph`."""
    found: set[str] = set()
    waiting = [*starts]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += graph[name]
    return found


def imported_libraries(file: Path) -> set[str]:
    """Return the top names of what `file` imports."""
    return {name.partition(".")[0] for name in imported_modules(file)}


def files_of(*parts: str) -> Iterator[Path]:
    """Yield the files of these parts of the package: folders, or modules at its top."""
    for part in parts:
        yield from sorted((PACKAGE / part).rglob("*.py"))
        yield from sorted(PACKAGE.glob(f"{part}.py"))
