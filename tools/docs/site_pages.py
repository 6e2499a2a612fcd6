"""Pages of the documentation's site that are not in docs/: a hook of mkdocs."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository, and the pages that they become."""

REFERENCE = "reference"
"""Folder of the API reference: a page for each package."""

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the API reference to the navigation."""
    pages = [f"{REFERENCE}/{name}" for name in reference_pages()]
    config.nav = [*(config.nav or []), {"API reference": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of BESIDE and of the API reference."""
    for name, page in BESIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for name, text in reference_pages().items():
        files.append(File.generated(config, f"{REFERENCE}/{name}", content=text))
    return files


def reference_pages() -> dict[str, str]:
    """Return the API reference: Markdown by file name, which mkdocstrings fills from docstrings."""
    packages = sorted(path.parent for path in (ROOT / "megatron").glob("*/__init__.py"))
    names = ["api", *(package.name for package in packages)]
    pages = {f"{name}.md": f"# megatron.{name}\n\n::: megatron.{name}\n" for name in names}
    lines = [f"- [megatron.{name}]({name}.md)" for name in names]
    return {"index.md": "\n".join(["# API reference", "", *lines, ""]), **pages}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site; links to other files of the repository become plain text."""

    site_path = page.file.src_path
    if site_path.startswith(f"{REFERENCE}/"):
        return markdown
    folder = "." if site_path in BESIDE.values() else dirname(f"docs/{site_path}")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        path = normpath(join(folder, target))
        name = BESIDE.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:
            return text
        return f"[{text}]({relpath(name, dirname(site_path) or '.')}{anchor or ''})"

    return _LINK.sub(link, markdown)
