"""Process pool: a killed worker ends the wait for its results."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from problems import problem

from megatron.common.process_pool import LostWorkerError, map_in_processes

ENDLESS = """
import os, sys
from itertools import repeat
from megatron.common.process_pool import ordered_map
from megatron.common.cli import run_tool

def answer(size):
    return os.getpid(), bytes(size)  # much more than a pipe holds

def main(argv):
    for pid, _ in ordered_map(answer, repeat(1 << 24), 2):
        print(pid, flush=True)

if __name__ == "__main__":
    run_tool(main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_in_the_middle_of_an_answer_ends_the_wait(tmp_path, number):
    """As `timeout` and SLURM end a job, all its processes at once; or as the kernel ends one."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    tool = subprocess.Popen(
        [sys.executable, "endless.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        worker = int(tool.stdout.readline())
        os.kill(tool.pid, signal.SIGSTOP)
        time.sleep(0.3)  # until the pipes are full
        if number == signal.SIGTERM:
            os.killpg(tool.pid, number)
        else:
            os.kill(worker, number)
        os.kill(tool.pid, signal.SIGCONT)
        _, message = tool.communicate(timeout=20)
    finally:
        tool.kill()
    if number == signal.SIGTERM:
        assert (tool.returncode, message) == (143, "")
    else:
        assert tool.returncode == 1
        assert message.startswith("error: a worker process was killed")


class Answers:
    """Made in each worker; an item is how it answers."""

    def __call__(self, item):
        if item == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1 / item


def test_items_go_through_in_order_to_the_first_error_in_its_turn():
    found = map_in_processes(Answers, [1, 2, 4, 0, 1], 2)
    assert [next(found), next(found), next(found)] == [1, 0.5, 0.25]
    with pytest.raises(ZeroDivisionError) as caught:
        next(found)
    assert "return 1 / item" in str(caught.value.__cause__)


def fail(error):
    raise error


@pytest.mark.parametrize("make", [Answers, partial(fail, MemoryError("no room"))])
def test_a_worker_that_is_gone_is_an_error(make):
    with problem("worker process … memory", LostWorkerError):
        list(map_in_processes(make, ["kill"], 2))
