"""How tools end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tool import run_tool


@pytest.fixture(autouse=True)
def own_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def code_of(main):
    with pytest.raises(SystemExit) as caught:
        run_tool(main)
    return caught.value.code


def fail_with(error):
    def main(argv):
        raise error

    return main


def test_success_is_0_and_main_gets_the_words(monkeypatch):
    monkeypatch.setattr("sys.argv", ["tool.py", "--input", "a"])
    words = []
    assert code_of(words.extend) == 0
    assert words == ["--input", "a"]


def test_a_data_error_is_1_and_its_message(capsys):
    assert code_of(fail_with(DataError("a.bin is truncated"))) == 1
    assert capsys.readouterr().err == "error: a.bin is truncated\n"


def test_a_config_error_is_2_and_each_problem(capsys):
    assert code_of(fail_with(ConfigError("no vocabulary", "no input"))) == 2
    assert capsys.readouterr().err == "error: no vocabulary\nerror: no input\n"


def test_an_interrupt_is_130():
    assert code_of(fail_with(KeyboardInterrupt())) == 130


def test_a_termination_is_143_after_cleaning_up():
    cleaned = []

    def main(argv):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned.append(True)

    assert code_of(main) == 143
    assert cleaned


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_tool(fail_with(ZeroDivisionError()))


def run_with_closed_pipe(program):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, "-c", f"from megatron.tool import run_tool\n{program}"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_who_left_is_141_without_a_word(lines):
    ended = run_with_closed_pipe(f"run_tool(lambda argv: print('line\\n' * {lines}))")
    assert (ended.returncode, ended.stderr) == (141, "")


def test_another_broken_pipe_is_a_defect():
    with pytest.raises(BrokenPipeError):
        run_tool(fail_with(BrokenPipeError()))
