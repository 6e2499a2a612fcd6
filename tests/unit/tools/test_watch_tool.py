"""tools/watch.py, as its user calls it."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from problems import require_problem
from scripts import run_script

TOOL = str(Path(__file__).parents[3] / "tools" / "watch.py")


def watch(*words):
    return run_script("tools/watch.py", *words)


def step(iteration):
    record = {"event": "step", "iteration": iteration, "lm_loss": 2.5, "seconds": 0.5}
    return json.dumps(record) + "\n"


@pytest.fixture
def journal(tmp_path):
    file = tmp_path / "journal.jsonl"
    file.write_text(step(1) + '{"event": "st')
    return file


def test_a_run_is_printed_once_and_as_a_page(journal, tmp_path):
    done = watch(tmp_path, "--once")
    assert done.returncode == 0, done.stderr
    assert "iteration      1\n" in done.stdout and "\x1b" not in done.stdout
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "journal.jsonl").write_text(step(1) + step(2))
    page = ("--html", tmp_path / "page.html", "--compare", tmp_path / "other")
    done = watch("--run-dir", tmp_path, *page)
    assert done.stdout == f"written to {tmp_path / 'page.html'}\n"
    assert f"Comparison of {tmp_path.name}, other</h1>" in (tmp_path / "page.html").read_text()


def test_what_cannot_be_watched_is_an_error_of_one_line(journal, tmp_path):
    missing = watch(tmp_path / "none", "--once")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    journal.write_text("")
    empty = watch(tmp_path, "--once")
    assert (empty.returncode, empty.stderr) == (
        1,
        f"error: {tmp_path}: the journal has no step yet\n",
    )
    assert watch(tmp_path, "--every", "0").returncode == 2
    require_problem("--compare … --html", [watch(tmp_path, "--compare", tmp_path).stderr])
    require_problem("missing … --save", [watch().stderr])


def test_a_run_that_failed_before_it_had_a_journal_is_shown(tmp_path):
    message = "CheckpointError: " + "a table " * 40 + "and the cause"
    record = {"kind": "error", "rank": 0, "iteration": 0, "stage": "start", "message": message}
    (tmp_path / "failure.json").write_text(
        json.dumps(record | {"time": "2026-01-02T03:04:05+00:00"})
    )
    done = watch(tmp_path, "--once")
    assert done.returncode == 0, done.stderr
    first, state, next_step = done.stdout.splitlines()[:3]
    assert first.startswith(f"run | {tmp_path} | ")
    assert state == f"failed in iteration 0: error (rank 0 on , start): {message}"
    assert "docs/troubleshooting.md" in next_step and "docs/stopping.md" in next_step
    assert watch(tmp_path, "--html", tmp_path / "page.html").returncode == 0
    assert "and the cause" in (tmp_path / "page.html").read_text()


def test_a_run_is_followed_while_it_writes(journal, tmp_path):
    words = [sys.executable, TOOL, str(tmp_path), "--every", "0.05"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:
        # It tells for ever: without an end a line that never comes would be waited for as long.
        timer = threading.Timer(60, following.kill)
        timer.start()
        try:
            wait_for(following, "iteration      1\n")
            with journal.open("a") as file:
                file.write('ep"}\n' + step(2)[:9])
                file.flush()
                time.sleep(0.2)
                file.write(step(2)[9:])
            wait_for(following, "iteration      2\n")
        finally:
            timer.cancel()
            following.kill()


def test_a_run_that_has_ended_is_printed_once(journal, tmp_path):
    end = {"event": "end", "iteration": 1, "reason": "training is done", "exit_code": 0}
    journal.write_text(step(1) + json.dumps(end) + "\n")
    done = watch(tmp_path, "--every", "0.05")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iteration      1\n") == 1


def wait_for(process, line):
    for printed in process.stdout:
        if printed == line:
            return
    raise AssertionError(f"never printed: {line}")
