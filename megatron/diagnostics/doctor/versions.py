"""Installed versions of this project, Python and its libraries."""

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from megatron.common.version import VERSION, commit
from megatron.diagnostics.doctor.findings import VERSIONS, Problem, Section

ABSENT = "not installed"
_PACKAGES = (
    *("torch", "deepspeed", "numpy", "triton", "flash-attn", "apex", "bitsandbytes"),
    *("transformers", "tokenizers", "gigatoken", "sentencepiece", "tiktoken", "safetensors"),
    *("ninja", "mpi4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
_NEEDED = ("torch", "deepspeed", "numpy")
_REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements.txt"


def versions_section(requirements: Path = _REQUIREMENTS) -> Section:
    """Return the versions of this project, of Python and of libraries.

    Args:
        requirements: file with the versions that this project is tested with.
    """
    installed = {name: installed_version(name) for name in _PACKAGES}
    tested = pinned_versions(requirements)
    facts = {
        "megatron-deepspeed": f"{VERSION} {commit()}".strip(),
        "python": platform.python_version(),
        **{
            name: f"{text} (tested with {tested[name]})"
            if text.partition("+")[0] != tested.get(name, text.partition("+")[0])
            else text
            for name, text in installed.items()
        },
        "system": platform.platform(),
    }
    return Section(VERSIONS, facts, tuple(version_problems(installed)))


def version_problems(installed: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the missing packages without which no run starts."""
    for name in _NEEDED:
        if installed[name] == ABSENT:
            yield Problem(
                f"the package {name} is not installed",
                "run `python -m pip install -r requirements.txt` in the environment of this python",
            )


def installed_version(package: str) -> str:
    """Return the version of `package` without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def pinned_versions(requirements: Path) -> dict[str, str]:
    """Return the versions that a requirements file pins.

    Without the file: those that the installed package requires; none where there is neither.
    """
    try:
        text = requirements.read_text(encoding="utf-8")
    except OSError:
        try:
            text = "\n".join(requires("megatron-deepspeed") or ())
        except PackageNotFoundError:
            return {}
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))
