"""What the documentation tells a user to type works, and what it points at exists."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import REPOSITORY, free_port, start

from megatron.config.config import parse_config

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
DATA_PAGE = REPOSITORY / "docs" / "data.md"
SCRIPTS = sorted(script.name for script in REPOSITORY.glob("*.py"))
DATA_FILES = (
    "corpus.jsonl",
    "corpus_text_document.bin",
    "corpus_text_document.idx",
    "vocab.json",
    "merges.txt",
)
"""What the first block of DATA_PAGE makes, and the other pages use."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_PATH = re.compile(r"`((?:megatron|tasks|tools|examples|docs|tests)/[\w./-]*)`")


@dataclass(frozen=True)
class Block:
    """A fenced part of a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2])
        for fence in _FENCE.finditer(text)
    ]


def checkout(folder: Path) -> Path:
    """Make `folder` look like the repository's, so that pages run there and leave files there."""
    folder.mkdir(exist_ok=True)
    for name in (*SCRIPTS, "megatron", "tasks", "tools", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def execute(block: Block, folder: Path) -> None:
    """Run a block as its reader would, on a port that other jobs of this machine do not use."""
    port = str(free_port())
    launchers = folder / ".launchers"
    launchers.mkdir(exist_ok=True)
    launcher = launchers / "deepspeed"
    real = Path(sys.executable).with_name("deepspeed")
    launcher.write_text(f'#!/bin/sh\nexec {real} --master_port {port} "$@"\n')
    launcher.chmod(0o755)
    script = f'set -euo pipefail\nPATH="{launchers}:$PATH"\n{block.text}'
    done = start("bash", "-c", script, cwd=folder, PET_MASTER_PORT=port)
    where = f"{block.page.relative_to(REPOSITORY)}, line {block.line}"
    assert done.codes == [0], f"{where}:\n{block.text}\n{done.outputs[0]}"


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where all blocks of DATA_PAGE have run."""
    folder = checkout(tmp_path_factory.mktemp("docs-data"))
    for block in blocks_of(DATA_PAGE):
        if block.language == "bash":
            execute(block, folder)
    return folder


def with_bash_blocks() -> list[Path]:
    return [page for page in PAGES if any(block.language == "bash" for block in blocks_of(page))]


@pytest.mark.parametrize("page", with_bash_blocks(), ids=lambda page: page.name)
def test_commands_run(page: Path, data_folder: Path, tmp_path: Path) -> None:
    if page == DATA_PAGE:
        return  # run by the fixture
    folder = checkout(tmp_path / "checkout")
    for name in DATA_FILES:
        shutil.copy(data_folder / name, folder)
    for block in blocks_of(page):
        if block.language == "bash":
            execute(block, folder)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield place and words of each command in blocks that are shown and not run."""
    for block in (block for page in PAGES for block in blocks_of(page)):
        if block.language == "console":
            for line in block.text.replace("\\\n", " ").splitlines():
                if re.match(r"(bash|python|deepspeed|srun)\b", line):
                    yield f"{block.page.name}:{block.line}", shlex.split(line)


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=place) for place, words in shown_commands()]
)
def test_commands_that_are_only_shown_are_right(words: list[str], tmp_path: Path) -> None:
    if words[0] == "bash":
        assert start("bash", "-n", str(REPOSITORY / words[1])).codes == [0]
        return
    script = next(i for i, word in enumerate(words) if word in SCRIPTS)
    network = tmp_path / "network.yaml"
    network.write_text(
        "num-layers: 2\nhidden-size: 8\nnum-attention-heads: 2\nseq-length: 8\n"
        "micro-batch-size: 1\nlr: 0.1\n"
    )
    flags = [str(network) if word.endswith(".yaml") else word for word in words[script + 1 :]]
    parse_config(flags)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [file + place for file, place in _LINK.findall(text) if not leads(page, file, place)]
    missing += [path for path in _PATH.findall(text) if not (REPOSITORY / path).exists()]
    assert missing == []


def leads(page: Path, file: str, place: str) -> bool:
    """Return whether a link of `page` to the heading `place` of `file` finds something."""
    target = page.parent / file if file else page
    return target.exists() and (not place or place in places_of(target))


def places_of(page: Path) -> set[str]:
    """Return the links to the headings of a page, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


def test_a_link_that_leads_nowhere_is_found() -> None:
    assert leads(DATA_PAGE, "", "#from-text-to-tokens")
    assert not leads(DATA_PAGE, "", "#from-tokens-to-text")
    assert not leads(DATA_PAGE, "data.markdown", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_what_they_are(page: Path) -> None:
    """A fence without a language would be a command that nothing runs."""
    unknown = [b.line for b in blocks_of(page) if b.language not in ("bash", "console", "text")]
    assert unknown == []


def test_the_readme_leads_to_every_page() -> None:
    links = {file for file, _ in _LINK.findall(PAGES[0].read_text(encoding="utf-8"))}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= links


def test_the_diagram_names_every_part() -> None:
    (diagram,) = (b for b in blocks_of(REPOSITORY / "docs/architecture.md") if b.language == "text")
    package = REPOSITORY / "megatron"
    folders = {file.parent.name for file in package.glob("*/__init__.py")}
    files = {file.stem for file in package.glob("*.py")} - {"__init__"}
    assert folders | files <= set(diagram.text.split())
