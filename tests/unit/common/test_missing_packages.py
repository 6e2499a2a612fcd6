"""Packages that only some parts need."""

import pytest
from problems import problem

from megatron.common.errors import needed_for


def test_a_package_that_is_missing_is_named() -> None:
    with problem("--fast … pip install warp-drive"), needed_for("--fast", "warp-drive"):
        import warp_drive  # noqa: F401


def test_other_errors_stay() -> None:
    with pytest.raises(ValueError, match="no module"), needed_for("--fast", "warp-drive"):
        raise ValueError("no module")
