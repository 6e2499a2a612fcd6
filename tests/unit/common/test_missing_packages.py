"""Packages that only some parts need."""

import re

import pytest
from problems import problem
from source import REPOSITORY

from megatron.common.errors import EXTRAS, needed_for


def test_a_package_that_is_missing_is_named() -> None:
    with problem("--fast … pip install warp-drive"), needed_for("--fast", "warp-drive"):
        import warp_drive  # noqa: F401


def test_other_errors_stay() -> None:
    with pytest.raises(ValueError, match="no module"), needed_for("--fast", "warp-drive"):
        raise ValueError("no module")


def test_the_extra_of_a_package_is_named():
    message = '--codecarbon-dir … pip install codecarbon … "megatron-deepspeed[energy]"'
    with problem(message), needed_for("--codecarbon-dir", "codecarbon"):
        raise ModuleNotFoundError("no module")


def test_extras_are_those_of_the_requirements():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    extra, found = "", {}
    for line in filter(None, lines):
        if line.startswith("# ["):
            extra = line.strip("# []")
        elif extra:
            found[re.split("[<>=]", line)[0]] = extra
    assert found == EXTRAS
