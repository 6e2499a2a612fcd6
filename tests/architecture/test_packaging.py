"""Files agree on packages, versions and licence."""

import ast
import re
import sys

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from source import REPOSITORY, SCRIPTS

from megatron.common.commands import SCRIPTS as COMMANDS
from megatron.common.version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RANGES = [REPOSITORY / f"requirements{part}.txt" for part in ("", "-server", "-eval", "-dev")]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> list[Requirement]:
    lines = [line for file in RANGES for line in file.read_text(encoding="utf-8").splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def versions(file: str) -> dict[str, set[Version]]:
    """Return the pinned versions by package; a lock may have one for each Python."""
    found: dict[str, set[Version]] = {}
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    for name, number in re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE):
        found.setdefault(canonicalize_name(name), set()).add(Version(number))
    return found


@pytest.mark.parametrize("file", ["requirements.lock", "requirements-lowest.txt"])
def test_pinned_versions_are_inside_the_ranges(file: str) -> None:
    pinned = versions(file)
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name == "torch" and file.endswith(".lock"):
            assert name not in pinned
            pinned |= versions("requirements-torch.txt")
        outside = [v for v in pinned[name] if v not in requirement.specifier]
        assert not outside, f"{file}: {name} {outside}, but the range is {requirement.specifier}"


def test_the_lowest_versions_are_the_lower_ends() -> None:
    lowest = versions("requirements-lowest.txt")
    for requirement in requirements():
        ends = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
        if ends:
            assert lowest[canonicalize_name(requirement.name)] == set(ends), requirement


def test_every_locked_version_has_a_hash() -> None:
    text = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 100
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_commands_are_those_of_the_package_and_of_the_page() -> None:
    commands = dict.fromkeys(COMMANDS, "megatron.common.commands:main")
    verbs = {"megatron": "megatron.common.commands:run_verb"}
    assert PROJECT["project"]["scripts"] == verbs | commands
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(megatron-[\w-]+)` \| `([\w./]+)` \|$", page, re.MULTILINE))
    modules = {
        command: file.removesuffix(".py").replace("/", ".").replace("tools.", "megatron_tools.")
        for command, file in rows.items()
    }
    assert {c: m.replace("tasks.", "megatron_tasks.") for c, m in modules.items()} == COMMANDS
    assert [file for file in rows.values() if not (REPOSITORY / file).is_file()] == []


def test_the_package_has_every_entry_script() -> None:
    scripts = {file.stem for file in REPOSITORY.glob("*.py")} - {"setup"}
    assert scripts == {*PROJECT["tool"]["setuptools"]["py-modules"]}


def test_the_oldest_python_can_read_every_file() -> None:
    oldest = re.fullmatch(r">=3\.(\d+),<3\.14", PROJECT["project"]["requires-python"])
    assert oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{oldest[1]}"
    assert PROJECT["tool"]["mypy"]["python_version"] == f"3.{oldest[1]}"
    files = [*(REPOSITORY / "megatron").rglob("*.py"), *SCRIPTS]
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, int(oldest[1])))


def test_the_citation_has_the_version_and_the_licence() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert f"## {VERSION}" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")


def test_what_training_needs_is_all_that_is_imported_without_asking() -> None:
    """But for routes of the server, Triton and lm_eval: other parts import theirs where they are used."""
    needed = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").partition("# [")[0]
    names = {Requirement(line).name for line in needed.splitlines() if line[:1] not in ("", "#")}
    of_torch = {"jinja2"}
    known = {name.replace("-", "_") for name in names} | {"yaml", "megatron"} | of_torch
    elsewhere = {"inference/server", "extensions/openai_api", "fused_kernels/triton"}
    found: dict[str, str] = {}
    for file in (REPOSITORY / "megatron").rglob("*.py"):
        folder = file.parent.relative_to(REPOSITORY / "megatron").as_posix()
        if folder not in elsewhere and file.name not in ("routes.py", "lm_eval_harness.py"):
            body = ast.parse(file.read_text(encoding="utf-8")).body
            imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
            roots = {name.partition(".")[0] for node in imports for name in names_of(node)}
            found |= dict.fromkeys(roots - known - sys.stdlib_module_names, str(file))
    assert found == {}


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that a statement imports."""
    return [str(node.module)] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]


def test_spelling_is_checked_in_no_folder_that_git_ignores() -> None:
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    folders = {line.split("/")[1] for line in ignored if line.startswith("/")}
    assert "quickstart" in folders
    assert folders <= {*PROJECT["tool"]["codespell"]["skip"].split(",")}


def test_the_quick_tests_exist() -> None:
    script = (REPOSITORY / "tests" / "run.sh").read_text(encoding="utf-8")
    paths = script.partition("quick=(")[2].partition(")")[0].split()
    assert paths
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
