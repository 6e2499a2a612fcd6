"""Functions and files that are read in one go."""

import ast
from collections.abc import Iterator
from pathlib import Path

from source import PACKAGE, REPOSITORY

MOST_LINES_OF_FILES, MOST_LINES_OF_FUNCTIONS = 500, 60


def test_files_and_functions_are_short() -> None:
    files = sorted([*PACKAGE.rglob("*.py"), *(REPOSITORY / "tools").rglob("*.py")])
    assert [found for file in files for found in too_long(file)] == []


def too_long(file: Path) -> Iterator[str]:
    text, name = file.read_text(encoding="utf-8"), file.relative_to(REPOSITORY)
    if (lines := len(text.splitlines())) > MOST_LINES_OF_FILES:
        yield f"{name}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MOST_LINES_OF_FUNCTIONS:
                yield f"{name}: {node.name} has {lines} lines"
