"""What a run runs on and with."""

import platform
import subprocess
from importlib.metadata import version

import numpy
import pytest

from megatron.checkpointing.compare import Difference
from megatron.common.nvidia import driver
from megatron.common.version import commit
from megatron.training.checkpoints.system_info import differences, system_info


def test_software_and_devices_are_told(group):
    found = system_info()
    assert found["torch"] == version("torch")
    assert found["numpy"] == numpy.__version__
    assert found["python"] == platform.python_version()
    assert found["devices"] == "1 x CPU"
    assert found["hosts"]
    assert set(found) >= {"megatron", "commit", "deepspeed", "triton", "cuda", "driver"}


def test_only_what_both_tell_of_is_compared():
    then = {"torch": "2.4", "python": "3.11", "hosts": "a"}
    now = {"torch": "2.5", "python": "3.11", "hosts": "b, c", "commit": "1234"}
    assert differences(then, now) == [
        Difference("torch", "2.4", "2.5"),
        Difference("hosts", "a", "b, c"),
    ]


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_the_commit_tells_of_files_that_differ(tmp_path):
    assert commit(tmp_path) == ""
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    assert commit(tmp_path) == ""
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{clean}-dirty"
    # A folder inside is no repository of its own.
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\nGCC\n",
            "550.54.15",
        ),
        ("", ""),
    ],
)
def test_the_driver_is_read_where_it_tells_itself(tmp_path, text, expected):
    file = tmp_path / "version"
    assert driver(file) == ""
    file.write_text(text)
    assert driver(file) == expected
