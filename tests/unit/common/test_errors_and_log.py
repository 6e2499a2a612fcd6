"""Errors that a user can mend, and how messages get out."""

import logging
import warnings

import pytest

from megatron.common import logging as log
from megatron.common.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    DataError,
    MegatronError,
    NewerCheckpointError,
    UnreadableCheckpointError,
    WrongCheckpointError,
    WrongDataError,
    before_the_first_step,
    raise_if_any,
)


def test_problems_are_raised_together():
    with pytest.raises(ConfigError, match="^one\ntwo$") as caught:
        raise_if_any(problem for problem in ("one", "two"))
    assert caught.value.problems == ("one", "two")


def test_no_problem_is_no_error():
    raise_if_any(iter([]))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 1),
        (CheckpointError("x"), 1),
        (NewerCheckpointError("x"), 2),
    ],
)
def test_errors_have_their_exit_codes(error, code):
    assert isinstance(error, MegatronError)
    assert (error.exit_code, str(error)) == (code, "x")


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (DataError("x"), WrongDataError),
        (WrongDataError("x"), WrongDataError),
        (CheckpointError("x"), WrongCheckpointError),
        (BusyError("x"), BusyError),
        (UnreadableCheckpointError("x"), UnreadableCheckpointError),
        (OSError("x"), OSError),
    ],
)
def test_data_that_is_wrong_before_the_first_step_is_wrong_for_every_attempt(error, seen):
    with pytest.raises(seen, match="^x$") as caught, before_the_first_step():
        raise error
    assert type(caught.value) is seen


@pytest.fixture
def logger():
    """The package's logger, put back afterwards."""
    own = logging.getLogger("megatron")
    before = own.handlers[:], own.propagate, own.level
    yield own
    own.handlers[:], own.propagate = before[:2]
    own.setLevel(before[2])


@pytest.mark.parametrize(
    ("rank", "lines"),
    [
        (0, ["hello", "WARNING [rank 0]: careful", "ERROR [rank 0]: bad"]),
        (3, ["ERROR [rank 3]: bad"]),
    ],
)
def test_rank_0_speaks_the_others_when_something_is_wrong(logger, capsys, rank, lines):
    log.configure(rank)
    child = logging.getLogger("megatron.some.module")
    child.info("hello")
    child.warning("careful")
    child.error("bad")
    child.debug("detail")
    assert capsys.readouterr().out.splitlines() == lines


def test_configuring_again_does_not_double_the_lines(logger, capsys):
    log.configure(0)
    log.configure(0)
    logging.getLogger("megatron").info("once")
    assert capsys.readouterr().out == "once\n"


def test_of_warnings_only_those_of_calls_that_are_not_ours_are_kept_back(logger):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        log.configure(0)
        text = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
        warnings.warn(text, FutureWarning, stacklevel=1)
        warnings.warn("`torch.load` is deprecated.", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in found] == ["`torch.load` is deprecated."]


def test_warnings_of_an_import_of_torchao_are_kept_back(logger, caplog):
    log.configure(0)
    torchao, pytree = map(logging.getLogger, ("torchao", "torch.utils._pytree"))
    torchao.warning("Failed to load /site/torchao/_C_mxfp8.so: Could not load this library")
    pytree.warning("%s is an Enum subclass and is now natively supported by torch.compile", "A")
    torchao.warning("another")
    pytree.warning("a third")
    assert caplog.messages == ["another", "a third"]
