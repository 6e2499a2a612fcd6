"""Which folders are installed, under which names, and what they need; the rest is in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

# Scripts are installed under names that no other package has.
SCRIPTS = {"megatron_tools": "tools", "megatron_tasks": "tasks"}
PRESETS = {"megatron_models": "examples/models"}
# The address of the repository: this checkout may be a copy that has none.
REPOSITORY = os.environ.get("REPOSITORY_URL", "")
# The pictures of the project's pages.
NOT_INSTALLED = ["docs", "docs.*"]


def requirements(part: str = "") -> str:
    """Return the text of a requirements file."""
    return (Path(__file__).parent / f"requirements{part}.txt").read_text(encoding="utf-8")


def description() -> str:
    """Return README.md, with complete links if the address of the repository is known."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(?<=\]\()(?!https?:|#)[^)]+", complete_link, text) if REPOSITORY else text


def complete_link(path: re.Match[str]) -> str:
    """Return the address of a file of the repository: of a picture itself, or of its page."""
    return f"{REPOSITORY}/{'raw' if path[0].endswith(('.png', '.svg')) else 'blob'}/HEAD/{path[0]}"


# Of "needed by all # [extra] its own # [extra] its own".
needed, *parts = re.split(r"^# \[(\w+)\]\n", requirements(), flags=re.MULTILINE)
extras = dict(zip(parts[::2], parts[1::2], strict=True))
extras["server"] = requirements("-server")
extras["all"] = "\n".join(extras.values())
extras |= {name: requirements(f"-{name}") for name in ("eval", "gpu", "docs")}
extras["dev"] = "\n".join(
    [*(extras[name] for name in ("all", "eval", "docs")), requirements("-dev")]
)

setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls={"Repository": REPOSITORY} if REPOSITORY else {},
    install_requires=needed,
    extras_require=extras,
    packages=[
        *find_packages(include=["megatron", "megatron.*"]),
        *SCRIPTS,
        *PRESETS,
        *(
            f"{name}.{package}"
            for name, folder in SCRIPTS.items()
            for package in find_namespace_packages(folder, exclude=NOT_INSTALLED)
        ),
    ],
    package_dir=SCRIPTS | PRESETS,
)
