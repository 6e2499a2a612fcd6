"""Which folders are installed, under which names; everything else stands in pyproject.toml."""

from setuptools import find_namespace_packages, find_packages, setup

# Scripts are installed under names that no other package has.
SCRIPTS = {"megatron_tools": "tools", "megatron_tasks": "tasks"}
PRESETS = {"megatron_models": "examples/models"}
# The pictures of the project's pages.
NOT_INSTALLED = ["docs", "docs.*"]

setup(
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
