"""The pages of the documentation, and the fenced blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
RECIPES = DOCS / "recipes"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
SCRIPTS = sorted({script.name for script in REPOSITORY.glob("*.py")} - {"setup.py"})
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced part of a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page: all of them, or those in one language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2])
        for fence in FENCE.finditer(text)
        if language in (None, fence[1])
    ]


def name_of(page: Path) -> str:
    """Return the name of a page, as its readers write it: README.md, or the path in docs/."""
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def checkout(folder: Path) -> Path:
    """Make `folder` look like the repository's, so that pages run there and leave files there."""
    folder.mkdir(exist_ok=True)
    for name in (*SCRIPTS, "megatron", "tasks", "tools", "benchmarks", "examples", "slurm"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder
