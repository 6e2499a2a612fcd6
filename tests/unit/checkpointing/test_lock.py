"""One run at a time writes to a directory."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from problems import problem

from megatron.checkpointing.lock import hold_lock
from megatron.checkpointing.manifest import LOCK, staging_tag_of
from megatron.checkpointing.publish import clear_staging, publish
from megatron.common.errors import CheckpointError, ExitCode
from megatron.common.process_identity import pid_namespace


def owned_by(file, **changes):
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": "1",
        "numbers": pid_namespace(),
        "since": "then",
    }
    file.write_text(json.dumps(owner | changes))


def test_two_runs_do_not_write_to_one_directory(tmp_path):
    with hold_lock(tmp_path):
        words = f"--save … {os.getpid()} … lock.json"
        with problem(words, CheckpointError) as error, hold_lock(tmp_path):
            pass
        # It will end, and another attempt may then go on.
        assert error.value.exit_code == ExitCode.FAILED
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_the_lock_goes_when_a_run_fails(tmp_path):
    with pytest.raises(KeyError), hold_lock(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path, caplog):
    code = (
        "import os; from pathlib import Path; from megatron.checkpointing.lock import hold_lock\n"
        f"with hold_lock(Path({str(tmp_path)!r})): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert (tmp_path / LOCK).exists()
    with hold_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert "left by a run that has ended" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_later_process_of_the_same_number_is_not_the_owner(tmp_path):
    owned_by(tmp_path / LOCK, started="1")
    with hold_lock(tmp_path):
        pass


@pytest.mark.parametrize("content", ['{"host": "elsewhere"', None])
def test_a_silent_owner_elsewhere_is_dead(tmp_path, content):
    owned_by(tmp_path / LOCK, host="elsewhere", numbers="elsewhere")
    if content:
        (tmp_path / LOCK).write_text(content)
    with hold_lock(tmp_path, silence_s=0.2):
        assert json.loads((tmp_path / LOCK).read_text())["host"] == socket.gethostname()


@pytest.mark.parametrize("host", ["elsewhere", socket.gethostname()], ids=["host", "container"])
def test_an_owner_elsewhere_that_touches_its_lock_lives(tmp_path, host):
    owned_by(tmp_path / LOCK, host=host, numbers="elsewhere")
    ended = threading.Event()

    def touch():
        while not ended.wait(0.02):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        words = f"{host}, since then … lock.json"
        with problem(words, CheckpointError), hold_lock(tmp_path, silence_s=30):
            pass
    finally:
        ended.set()
        thread.join()


def test_an_owner_touches_its_lock(tmp_path):
    with hold_lock(tmp_path, beat_s=0.01):
        before = (tmp_path / LOCK).stat().st_mtime_ns
        until = time.monotonic() + 30
        while (tmp_path / LOCK).stat().st_mtime_ns == before and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / LOCK).stat().st_mtime_ns > before


def test_a_run_that_was_taken_for_dead_writes_nothing_more(tmp_path):
    with hold_lock(tmp_path, beat_s=0.01):
        staging = clear_staging(tmp_path, 5)
        owned_by(tmp_path / LOCK, pid=1)
        for write in (partial(publish, tmp_path, 5), partial(clear_staging, tmp_path, 10)):
            with problem("--save … process 1 on … took over", CheckpointError):
                write()
        assert [staging_tag_of(5)] == [path.name for path in tmp_path.iterdir() if path.is_dir()]
        # Nor does it keep the lock of the other one alive.
        time.sleep(0.1)
        before = (tmp_path / LOCK).stat().st_mtime_ns
        time.sleep(0.1)
        assert (tmp_path / LOCK).stat().st_mtime_ns == before
    assert staging.is_dir()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == 1
