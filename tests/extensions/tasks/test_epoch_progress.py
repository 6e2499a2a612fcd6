"""Progress bar of finetuning: on a terminal alone, beside log lines."""

import io
import logging
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

from megatron.checkpointing.train_state import TrainState
from megatron.common import logging as log
from megatron.extensions.tasks.evaluation import EpochProgress


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def take_steps(progress, first, last):
    state = TrainState(iteration=first)
    for _ in range(first, last):
        progress.before_step(state)
        state.iteration += 1
        progress.after_step(state, SimpleNamespace(loss=0.5))


def test_a_bar_counts_the_steps_of_each_epoch():
    with redirect_stderr(Terminal()) as stderr:
        progress = EpochProgress(3)
        take_steps(progress, 2, 4)
        progress.close()
    shown = stderr.getvalue()
    assert "epoch 0:  67%" in shown and "2/3" in shown
    assert "epoch 1:   0%" in shown
    assert shown.endswith("\r")


def test_no_bar_is_written_to_a_file():
    with redirect_stderr(io.StringIO()) as stream:
        take_steps(EpochProgress(3), 0, 4)
    assert not stream.getvalue()


def test_log_lines_do_not_go_on_in_the_line_of_a_bar():
    with redirect_stderr(Terminal()) as stderr, redirect_stdout(stderr):
        log.configure(0)
        progress = EpochProgress(3)
        progress.before_step(TrainState())
        logging.getLogger("megatron.test").info("a message")
        progress.close()
    assert "\ra message\n" in stderr.getvalue()
