"""Files for containers and continuous integration agree with the repository; nothing is built."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from pages_of_docs import PAGES, blocks_of
from source import REPOSITORY

from megatron.common.version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))
SHOWN = "".join(block.text for page in PAGES for block in blocks_of(page, "console"))
_FILE = re.compile(r"[\w./-]+\.(?:py|sh|txt|lock)\b")


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return each instruction with its arguments, without comments."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_uses_files_that_exist(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    assert [name for name, _ in found if name == "FROM"] == ["FROM"]
    assert found[0][0] == "ARG" and found[0][1].startswith("BASE=")
    assert ("FROM", "${BASE}") in found
    for name, text in found:
        words = text.split()
        if name == "COPY":
            sources = [word for word in words[:-1] if not word.startswith("--")]
            assert all((REPOSITORY / source).exists() for source in sources), text
        if name == "RUN":
            files = [file for file in _FILE.findall(text) if not file.startswith("/")]
            assert all((REPOSITORY / file).is_file() for file in files), text
    built = f"docker build --file docker/{dockerfile.name} "
    assert SHOWN.count(built) == 1
    usage = re.findall(r"^#   (docker .*)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(usage) == 2
    assert [command for command in usage if command not in SHOWN] == []


def test_the_development_container_is_the_image_for_cpus() -> None:
    folder = REPOSITORY / ".devcontainer"
    settings = json.loads((folder / "devcontainer.json").read_text(encoding="utf-8"))
    dockerfile = (folder / settings["build"]["dockerfile"]).resolve()
    assert dockerfile in DOCKERFILES
    assert (folder / settings["build"]["context"]).resolve() == REPOSITORY
    found = instructions(dockerfile)
    assert ("USER", settings["remoteUser"]) in found
    venv = Path(settings["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"])
    assert f"VIRTUAL_ENV={venv.parents[1]} " in next(text for name, text in found if name == "ENV")


def test_the_installed_torch_is_kept() -> None:
    script = REPOSITORY / "docker" / "kept_packages.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert f"torch=={version('torch')}" in done.stdout.splitlines()
    assert "numpy" not in done.stdout


def test_workflows_run_scripts_that_exist_and_actions_that_cannot_change() -> None:
    (workflow,) = (REPOSITORY / ".github" / "workflows").iterdir()
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == [
        *("bash .ci/run", "bash tests/run.sh tests/unit"),
        *("bash tools/docs.sh", "bash .ci/release", "bash .ci/publish"),
    ]
    assert [each["run"] for each in steps if "env" in each] == ["bash .ci/publish"]
    assert "GH_TOKEN" not in jobs["release"]["env"]
    for command in commands:
        assert all((REPOSITORY / path).exists() for path in command.split()[1:])
    actions = [step["uses"] for step in steps if "uses" in step]
    assert [each for each in actions if not re.search("@[0-9a-f]{40}$", each)] == []
    assert jobs["release"]["needs"] == [name for name in jobs if name != "release"]


def test_unit_tests_run_with_every_python_that_the_package_promises() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    workflow = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    prefix = "Programming Language :: Python :: "
    promised = [
        each.removeprefix(prefix) for each in project["project"]["classifiers"] if prefix in each
    ]
    assert (
        yaml.safe_load(workflow)["jobs"]["unit-tests"]["strategy"]["matrix"]["python"] == promised
    )


def test_only_the_tag_of_the_version_is_released() -> None:
    """The script ends before it builds anything."""
    command, names = ["bash", ".ci/release"], {**os.environ, "GITHUB_REF_NAME": "v0.0.1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=names, capture_output=True, text=True)
    assert done.returncode == 2
    assert VERSION in done.stderr
