"""Locks of killed compilations are removed, and those of living ones are waited for by name."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from problems import require_problem
from torch.utils.file_baton import FileBaton

from megatron.engine.deepspeed import compile_locks
from megatron.engine.deepspeed.compile_locks import watching_compile_locks


@pytest.fixture
def lock(tmp_path):
    """Where torch has the lock of an extension."""
    (tmp_path / "py311_cpu" / "cpu_adam").mkdir(parents=True)
    return tmp_path / "py311_cpu" / "cpu_adam" / "lock"


OWNER = """
import os, signal, sys
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)  # as torch's FileBaton
signal.pause()
"""


def until(condition):
    while not condition():
        time.sleep(0.01)


def test_the_lock_of_a_killed_compilation_is_removed(lock, tmp_path, caplog):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(lock)])
    until(lock.exists)
    with caplog.at_level(logging.INFO), watching_compile_locks(tmp_path, period_s=0.01):
        until(lambda: "is the lock of a compilation" in caplog.text)
        assert str(lock) in caplog.text
        assert lock.exists()
        owner.kill()
        owner.wait()
        FileBaton(str(lock)).wait()  # as torch does
    require_problem(f"{lock} … compilation … removed", [caplog.text])
    assert FileBaton(str(lock)).try_acquire()


def test_a_lock_that_is_judged_is_not_taken_by_a_second_process(lock):
    """Of two processes that find it stale, the slower one would remove the lock of a third."""
    lock.touch()
    other = (
        "import sys; from pathlib import Path; "
        "from megatron.engine.deepspeed.compile_locks import lease_abandoned\n"
        "with lease_abandoned(Path(sys.argv[1])) as inode: print(inode)"
    )

    def judged_elsewhere():
        words = [sys.executable, "-c", other, str(lock)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    inode = lock.stat().st_ino
    with compile_locks.lease_abandoned(lock) as ours:
        assert ours == inode
        assert judged_elsewhere() == "None"
    assert judged_elsewhere() == str(inode)


def test_own_locks_stay_without_a_word(lock, tmp_path, caplog, monkeypatch):
    looked, look = threading.Semaphore(0), compile_locks._is_open_here
    monkeypatch.setattr(
        compile_locks, "_is_open_here", lambda file: (looked.release(), look(file))[1]
    )
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    with caplog.at_level(logging.INFO), watching_compile_locks(tmp_path, period_s=0.01):
        for _ in range(4):
            assert looked.acquire(timeout=60)
    baton.release()
    assert not caplog.text


@pytest.mark.parametrize("reason", ["a network file system", "a compiler still works there"])
def test_a_lock_whose_owner_may_live_stays(lock, tmp_path, caplog, monkeypatch, reason):
    lock.touch()
    os.utime(lock, (0, 0))
    if reason == "a network file system":
        monkeypatch.setattr(compile_locks, "_file_system", lambda path: "nfs4")
    else:
        monkeypatch.chdir(lock.parent)
    with caplog.at_level(logging.INFO), watching_compile_locks(tmp_path, period_s=0.01):
        until(lambda: "if nothing compiles there any more, remove it" in caplog.text)
    assert lock.exists()
