from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from megatron.common.errors import ConfigError
from megatron.common.registry import TOKENIZERS, Registry
from megatron.config.config import SECTIONS
from megatron.config.parsing.flags import Names
from megatron.tokenizer.build import _TYPES


@dataclass(frozen=True, kw_only=True)
class WarpConfig:
    """Flags of a part."""

    warp: float = 2.0
    """How much."""


@pytest.fixture
def drives():
    registry = Registry("drive", "--drive", ("photon",))

    @registry.register("impulse")
    def impulse(x):
        return x

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


def test_a_part_without_flags(drives):
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


def test_the_name_of_a_built_in_part_is_refused(drives):
    with pytest.raises(ConfigError, match=r"drive photon of .*own has the name of a built-in one"):

        @drives.register("photon")
        def own(x):
            return x


def test_registries_know_the_names_that_flags_accept():
    for section in SECTIONS.values():
        for field, hint in get_type_hints(section, include_extras=True).items():
            found = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Names)]
            for kind in get_args(hint.__origin__) if found else ():
                names = {*get_args(kind)} if get_origin(kind) is Literal else set()
                if get_origin(hint.__origin__) is Literal:
                    names = {*get_args(hint.__origin__)}
                assert names <= {*found[0].registry.built_in}, field
    assert {*_TYPES} <= {*TOKENIZERS.built_in}


def test_a_definition_that_runs_again_replaces_itself(drives):
    def define(factor):
        @drives.register("again")
        def again(x):
            return x * factor

    define(2)
    define(3)
    assert drives.get("again")(1) == 3
