"""How tools end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, DataError


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


def test_success_is_0_and_main_gets_the_words(command_line):
    command_line("tool.py", "--input", "a")
    words = []
    assert code_of(words.extend) == 0
    assert words == ["--input", "a"]


def test_damaged_data_are_2_and_the_message(capsys):
    assert code_of(fail_with(DataError("a.bin is truncated"))) == 2
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


def test_a_second_termination_does_not_end_the_cleaning_up():
    cleaned = []

    def main(argv):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    assert code_of(main) == 143
    assert cleaned


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_tool(fail_with(ZeroDivisionError()))


def run_with_closed_pipe(program, *, stderr=subprocess.PIPE):
    reading, writing = os.pipe()
    os.close(reading)
    imports = "import logging; from megatron.common import logging as log; from megatron.common.cli import run_tool"
    try:
        return subprocess.run(
            [sys.executable, "-c", f"{imports}\n{program}"],
            stdout=writing,
            stderr=stderr,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    finally:
        os.close(writing)


LOGS_FOREVER = """
def main(argv):
    log.configure(0)
    print("a notice that is held back")
    try:
        while True:
            logging.getLogger("megatron.common.cli").info("line")
    finally:
        logging.getLogger("megatron.common.cli").warning("what is there, --resume takes up")
run_tool(main)
"""


@pytest.mark.parametrize(
    "program",
    [
        "run_tool(lambda argv: print('line'))",
        "run_tool(lambda argv: print('line\\n' * 100_000))",
        LOGS_FOREVER,
        "import argparse; run_tool(lambda argv: argparse.ArgumentParser().parse_args(['--help']))",
    ],
    ids=["one line", "many lines", "the log", "the help"],
)
def test_a_reader_who_left_is_141_without_a_word(program):
    ended = run_with_closed_pipe(program)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_reader_of_both_streams_who_left_is_141():
    assert run_with_closed_pipe(LOGS_FOREVER, stderr=subprocess.STDOUT).returncode == 141


def test_an_error_is_reported_though_no_process_reads_stdout():
    ended = run_with_closed_pipe(
        "from megatron.common.errors import DataError\n"
        "def main(argv):\n"
        "    print('a notice')\n"
        "    raise DataError('a.bin is truncated')\n"
        "run_tool(main)"
    )
    assert (ended.returncode, ended.stderr) == (2, "error: a.bin is truncated\n")


def test_what_shall_go_on_unread_goes_on_without_a_word():
    ended = run_with_closed_pipe(
        "from megatron.common.standard_streams import keep_writable\n"
        "keep_writable()\n"
        "log.configure(0)\n"
        "for _ in range(3): logging.getLogger('megatron.x').info('line')\n"
        "raise SystemExit(7)"
    )
    assert (ended.returncode, ended.stderr) == (7, "")


def test_another_broken_pipe_is_a_defect():
    with pytest.raises(BrokenPipeError):
        run_tool(fail_with(BrokenPipeError()))
