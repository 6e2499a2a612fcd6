"""How tools end."""

import os
import signal

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
