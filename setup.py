"""Which folders are installed, under which names, and what they need; the rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

# Scripts are installed under names that no other package has.
SCRIPTS = {"megatron_tools": "tools", "megatron_tasks": "tasks"}
PRESETS = {"megatron_models": "examples/models"}
# The pictures of the project's pages.
NOT_INSTALLED = ["docs", "docs.*"]


def requirements(part: str = "") -> str:
    """Return the text of a requirements file."""
    return (Path(__file__).parent / f"requirements{part}.txt").read_text(encoding="utf-8")


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
