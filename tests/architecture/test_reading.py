"""docs/reading.md: twenty files that a new engineer reads first."""

import re

from source import REPOSITORY, import_graph, imported_modules

PAGE = (REPOSITORY / "docs" / "reading.md").read_text("utf-8")
FILES = re.findall(r"(?m)^\d+\. `([^`]+)`", PAGE)

MOST_LINES = 4520
MOST_NEIGHBOURS = 128
"""Modules that the twenty import and that are none of them. Lower it where you can."""


def test_there_are_twenty_and_they_can_be_read_in_an_evening() -> None:
    numbers = [int(number) for number in re.findall(r"(?m)^(\d+)\. `", PAGE)]
    assert numbers == [*range(1, 21)]
    lines = {file: len((REPOSITORY / file).read_text("utf-8").splitlines()) for file in FILES}
    assert sum(lines.values()) <= MOST_LINES, lines


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:megatron|tests)/[\w./]+)`", PAGE)
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_they_lead_to_few_other_files_and_to_no_extension() -> None:
    graph = import_graph()
    own = {file.removesuffix(".py").replace("/", ".") for file in FILES}
    names = {name for file in FILES for name in imported_modules(REPOSITORY / file)}
    modules = {*names, *(name.rpartition(".")[0] for name in names)}
    neighbours = (modules & graph.keys()) - own
    assert [name for name in neighbours if name.startswith("megatron.extensions")] == []
    assert len(neighbours) <= MOST_NEIGHBOURS, sorted(neighbours)
