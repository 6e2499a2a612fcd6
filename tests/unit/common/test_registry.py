from dataclasses import dataclass

import pytest

from megatron.common.errors import ConfigError
from megatron.common.registry import Registry


@dataclass(frozen=True, kw_only=True)
class WarpConfig:
    """Flags of a part."""

    warp: float = 2.0
    """How much."""


@pytest.fixture
def drives():
    registry = Registry("drive", "--drive", {"impulse": lambda x: x})

    @registry.register("warp", flags=WarpConfig)
    def warp(x, *, flags):
        return x * flags.warp

    return registry


def test_a_part_gets_its_flags(drives):
    own = drives.flags_of("warp", {"WarpConfig": WarpConfig(warp=3.0)})
    assert own == (("warp", 3.0),)
    assert drives.get("warp", own)(2.0) == 6.0
    # As a manifest has them.
    assert drives.get("warp", [["warp", 4.0], ["other", 1]])(2.0) == 8.0


def test_a_built_in_part_has_no_flags(drives):
    assert drives.get("impulse")(2.0) == 2.0
    assert drives.flags_of("impulse", {}) == ()
    assert [*drives.sections()] == [WarpConfig]


def test_an_unknown_name_is_refused_with_its_neighbour_and_the_list(drives):
    with pytest.raises(ConfigError) as error:
        drives.get("wrap")
    for part in ("--drive wrap", "impulse, warp", "--plugin", "did you mean warp?"):
        assert part in str(error.value)


def test_a_name_belongs_to_one_part(drives):
    with pytest.raises(ConfigError, match="drive warp is registered already"):

        @drives.register("warp")
        def other(x):
            return x


def test_a_definition_that_runs_again_replaces_itself(drives):
    def define(factor):
        @drives.register("again")
        def again(x):
            return x * factor

    define(2)
    define(3)
    assert drives.get("again")(1) == 3
