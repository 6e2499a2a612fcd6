"""How a training process ends: its code, and who says what."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.training.process import launch

REPOSITORY = Path(__file__).resolve().parents[4]

PROGRAM = """
import sys
from megatron.common.errors import CheckpointError, ConfigError, DataError, PeerLeftError
from megatron.common.errors import WrongCheckpointError, WrongDataError
from megatron.training.process import launch

launch._HEAD_START_S = 0.0

class Stubborn:
    def __del__(self):
        print("destructor")

def main(argv):
    global kept
    kept = Stubborn()
    print("begun", *argv)
    {action}

launch.run_rank(main, ["--a", "b"])
"""


def end(action, **environment):
    """Return (code, stdout, stderr) of a process whose main does `action`."""
    bare = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(action=action)],
        cwd=REPOSITORY,
        env=bare | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_success_is_0():
    code, out, err = end("pass")
    assert (code, out.splitlines()[0], err) == (0, "begun --a b", "")


@pytest.mark.parametrize(
    ("action", "code", "message"),
    [
        ("raise ConfigError('first', 'second')", 2, "error: first\n  second\n"),
        ("raise DataError('no data')", 1, "error: no data\n"),
        ("raise WrongDataError('no file')", 2, "error: no file\n"),
        ("raise WrongCheckpointError('no folder')", 2, "error: no folder\n"),
        ("raise CheckpointError('none')", 1, "error: none\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_what_a_user_can_mend_is_a_message_without_traceback(action, code, message):
    assert end(action) == (code, "begun --a b\n", message)


def test_other_errors_have_their_traceback_and_rank():
    code, _, err = end("1 / 0", RANK="1", WORLD_SIZE="2")
    assert code == 1
    assert err.startswith("[rank 1] Traceback (most recent call last):")
    assert err.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_process_leaves_hard():
    # Destructors of process groups can wait for ranks that never answer.
    assert "destructor" in end("raise SystemExit(0)")[1]
    assert "destructor" not in end("pass")[1]
    assert "destructor" not in end("raise DataError('no data')")[1]


def test_other_ranks_say_which_they_are():
    assert end("raise DataError('no data')", RANK="1", WORLD_SIZE="2")[2] == (
        "error [rank 1]: no data\n"
    )


def test_of_ranks_with_the_same_error_one_speaks() -> None:
    actions = ["raise DataError('same')"] * 3 + ["raise DataError('other')"]
    waits = "import time; time.sleep = lambda s: (print('waits', flush=True), sys.stdin.read()); "
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(action=waits + action)],
            cwd=REPOSITORY,
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "5"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, action in enumerate(actions, start=1)
    ]
    for rank in ranks:
        assert (rank.stdout.readline(), rank.stdout.readline()) == ("begun --a b\n", "waits\n")
    *same, other = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert other == "error [rank 4]: other\n"
    assert sorted(same)[:2] == ["", ""]
    assert "".join(same) in {f"error [rank {rank}]: same\n" for rank in (1, 2, 3)}
    assert {rank.returncode for rank in ranks} == {1}


def test_a_stranger_who_holds_the_name_of_a_message_does_not_silence_it(monkeypatch):
    first = launch.claim_message("out of data")
    assert first
    assert launch.claim_message("out of data") is None
    with monkeypatch.context() as stranger:
        stranger.setattr(os, "getuid", lambda: -1)
        assert launch.claim_message("out of data")
    first.close()
    assert launch.claim_message("out of data")


def test_a_rank_whose_peer_has_told_why_it_left_waits_for_it():
    messages = "import time; time.sleep = lambda s: print('waits'); raise PeerLeftError('left')"
    code, out, err = end(messages, RANK="0", WORLD_SIZE="2")
    assert (code, out.splitlines()[1:], err) == (1, ["waits"], "error [rank 0]: left\n")


def test_a_broken_environment_does_not_hide_the_error():
    assert end("raise DataError('no data')", RANK="x")[2] == "error: no data\n"


def test_rank_0_speaks_and_the_others_warn_of_errors_only():
    action = "import logging; l = logging.getLogger('megatron.x'); l.info('hello'); l.error('bad')"
    assert end(action)[1].splitlines()[1:3] == ["hello", "ERROR [rank 0]: bad"]
    out = end(action, RANK="1", WORLD_SIZE="2")[1]
    assert out.splitlines()[1:2] == ["ERROR [rank 1]: bad"]
    assert "hello" not in out


@pytest.mark.parametrize(
    ("action", "waits"),
    [
        ("raise RuntimeError('gloo: Connection reset by peer')", True),
        ("raise DataError('no data')", True),
        ("raise RuntimeError('shapes differ')", False),
    ],
)
def test_the_rank_with_the_cause_speaks_first(action, waits):
    messages = "import time; time.sleep = lambda s: print('waits'); " + action
    assert ("waits" in end(messages, RANK="1", WORLD_SIZE="2")[1]) is waits


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("raise ConfigError('first', 'second')", "error: first\n  second"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("return 75", "stopped on request before its end: the same command resumes it"),
        ("pass", None),
        ("raise KeyboardInterrupt", None),
    ],
)
def test_the_launcher_of_torch_finds_the_root_cause(tmp_path, action, cause):
    file = tmp_path / "error.json"
    end(action, RANK="0", WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE=str(file))
    assert file.exists() is (cause is not None)
    if cause:
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
        messages = ChildFailedError("job", {0: failure}).format_msg()
        assert messages.rstrip("\n =").endswith(cause.replace("\n", "\n  ")), messages


def test_the_first_cause_stays_and_one_that_cannot_be_written_hides_nothing(tmp_path):
    file = tmp_path / "error.json"
    file.write_text("first")
    assert end("raise DataError('x')", TORCHELASTIC_ERROR_FILE=str(file))[2] == "error: x\n"
    assert file.read_text() == "first"
    nowhere = str(tmp_path / "none" / "error.json")
    assert end("raise DataError('x')", TORCHELASTIC_ERROR_FILE=nowhere)[::2] == (1, "error: x\n")
