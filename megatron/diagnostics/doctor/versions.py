"""Installed versions of this project, Python and its libraries."""

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from megatron.common.version import VERSION, commit
from megatron.diagnostics.doctor.findings import VERSIONS, Problem, Section

ABSENT = "not installed"
_SAME_NAME = "megatron-core"
"""The package that is imported as `megatron` too."""

_PACKAGES = (
    *("torch", "deepspeed", "numpy", "triton", "flash-attn", "apex", "bitsandbytes"),
    *("transformers", "tokenizers", "gigatoken", "sentencepiece", "tiktoken", "safetensors"),
    *("ninja", "mpi4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13", _SAME_NAME),
)
_NEEDED = ("torch", "deepspeed", "numpy")
_REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements.txt"


def versions_section(requirements: Path = _REQUIREMENTS) -> Section:
    """Return the versions of this project, of Python and of libraries.

    Args:
        requirements: file with the supported ranges.
    """
    installed = {name: installed_version(name) for name in _PACKAGES}
    facts = {
        "megatron-deepspeed": f"{VERSION} {commit()}".strip(),
        "python": platform.python_version(),
        **installed,
        "system": platform.platform(),
    }
    problems = (
        *version_problems(installed),
        *range_problems(installed, supported_ranges(requirements)),
    )
    return Section(VERSIONS, facts, problems)


def version_problems(installed: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the missing packages without which no run starts, and one that hides this project."""
    for name in _NEEDED:
        if installed[name] == ABSENT:
            yield Problem(
                f"the package {name} is not installed",
                "run `python -m pip install -r requirements.txt` in the environment of this python",
            )
    if installed[_SAME_NAME] != ABSENT:
        yield Problem(
            f"{_SAME_NAME} {installed[_SAME_NAME]} is imported as megatron too: the first of the two "
            "in sys.path hides the other",
            "install them in separate environments",
        )


def installed_version(package: str) -> str:
    """Return the version of `package` without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def range_problems(installed: Mapping[str, str], ranges: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the installed packages whose versions are outside the supported ranges.

    A pre-release, as in images with a custom torch, counts as that release.

    Args:
        ranges: such as ">=2,<3", by package.
    """
    for name in ranges.keys() & installed.keys():
        if installed[name] == ABSENT or is_in_range(installed[name], ranges[name]):
            continue
        yield Problem(
            f"{name} {installed[name]} is outside the supported range {ranges[name]}",
            f"run `python -m pip install '{name}{ranges[name]}'`, or expect failures that no test "
            "has met",
        )


def is_in_range(number: str, limits: str) -> bool:
    """Return whether a version meets all of the limits.

    >>> is_in_range("2.10.0a0+b4e4", ">=2.10,<2.16"), is_in_range("2.16.1", ">=2.10,<2.16")
    (True, False)
    """
    release = _release(number)
    for sign, limit in re.findall(r"(>=|<|==)([\d.]+)", limits):
        other = _release(limit)
        if not {">=": release >= other, "<": release < other, "==": release == other}[sign]:
            return False
    return True


def _release(number: str) -> tuple[int, ...]:
    """Return the numbers of a version, without zeros at the end."""
    found = re.match(r"\d+(?:\.\d+)*", number)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def supported_ranges(requirements: Path) -> dict[str, str]:
    """Return the range of each package of a requirements file.

    Without the file: those that the installed package requires; none where there is neither.
    """
    try:
        lines = requirements.read_text(encoding="utf-8").splitlines()
    except OSError:
        try:
            lines = [line for line in requires("megatron-deepspeed") or () if ";" not in line]
        except PackageNotFoundError:
            return {}
    return dict(re.findall(r"^([\w-]+)([<>=].+)$", "\n".join(lines), re.MULTILINE))
