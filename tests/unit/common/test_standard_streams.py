"""A process whose stdout or stderr cannot be written to ends with its own code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

PROGRAM = """
import logging, sys
from megatron.common.errors import CheckpointError, ConfigError
from megatron.common.standard_streams import lost_output
from megatron.training.process import launch

def main(argv):
    for number in range(3):
        logging.getLogger("megatron.x").info("line %d", number)
    print("printed", flush=True)
    print("progress", file=sys.stderr)
    open({record!r}, "w").write(lost_output())
    {end}

launch.run_rank(main, [])
"""

full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


def ended(streams, end, tmp_path, unbuffered=""):
    """Return the finished process of a shell that starts a rank with the redirections `streams`."""
    program = PROGRAM.format(end=end, record=str(tmp_path / "record"))
    return subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {streams}', sys.executable, program],
        cwd=REPOSITORY,
        env={**os.environ, "RANK": "", "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@full
@pytest.mark.parametrize(
    "streams", ["> /dev/full 2>&1", ">&- 2>&-", ">&-", "2>&-", "> /dev/full", "<&- >&- 2>&-"]
)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return 0", 0),
        ("return 75", 75),
        ("raise ConfigError('wrong')", 2),
        ("raise CheckpointError('lost')", 1),
        ("1 / 0", 1),
    ],
)
def test_the_code_is_the_same_whatever_takes_the_output(streams, end, code, tmp_path):
    assert ended(streams, end, tmp_path).returncode == code


@full
def test_a_full_disk_of_stdout_is_one_line_on_stderr(tmp_path):
    found = ended("> /dev/full", "return 0", tmp_path).stderr.splitlines()
    assert found == [
        "WARNING: stdout cannot be written to (No space left on device): lines are lost until it "
        "can, and the program goes on",
        "progress",
    ]
    assert (tmp_path / "record").read_text() == (
        "stdout cannot be written to (No space left on device)"
    )


@full
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_of_both_is_recorded(unbuffered, tmp_path):
    ended("> /dev/full 2>&1", "return 0", tmp_path, unbuffered)
    assert "stderr cannot be written to" in (tmp_path / "record").read_text()


def test_what_can_be_written_is(tmp_path):
    found = ended("", "return 75", tmp_path)
    assert found.stdout.splitlines() == ["line 0", "line 1", "line 2", "printed"]
    assert found.stderr == "progress\n"
    assert (tmp_path / "record").read_text() == ""


def test_output_goes_on_when_the_disk_has_space_again(tmp_path):
    log, end = tmp_path / "log", "import resource; limit(10**6); print('later')"
    program = PROGRAM.replace(
        "def main(argv):",
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))\n\n"
        "def main(argv):\n    limit(2)",
    ).format(end=end, record="/dev/null")
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" -c "$1" > "$2"', sys.executable, program, str(log)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text().endswith("later\n")
