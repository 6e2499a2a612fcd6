"""Packages that only some parts need."""

import pytest

from megatron.common.errors import ConfigError, needed_for


def test_a_package_that_is_missing_is_named() -> None:
    wanted = r"--fast needs a package that is not installed: pip install warp-drive \(No module"
    with pytest.raises(ConfigError, match=wanted), needed_for("--fast", "warp-drive"):
        import warp_drive  # noqa: F401


def test_other_errors_stay() -> None:
    with pytest.raises(ValueError, match="no module"), needed_for("--fast", "warp-drive"):
        raise ValueError("no module")
