"""Whether the process that had a pid still runs."""

import os
import subprocess
import sys

from megatron.common.process_identity import is_running, start_of


def test_a_process_runs_until_it_ends_and_a_zombie_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_of(child.pid)
    assert started and is_running(child.pid, started)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and stays a zombie
    assert start_of(child.pid) is None
    assert not is_running(child.pid, started)
    child.wait()
    assert not is_running(child.pid, started)


def test_a_later_process_with_the_pid_is_another():
    assert is_running(os.getpid(), start_of(os.getpid()))
    assert not is_running(os.getpid(), "1")
