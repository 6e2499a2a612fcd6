import sys
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

import pytest
from problems import problem

from megatron.common.errors import ConfigError
from megatron.common.registry import HOOKS, REGISTRIES, TOKENIZERS, Registry
from megatron.config.config import all_sections
from megatron.config.parsing.declaration import flags_of
from megatron.training.loop.loop import Hook


@dataclass(frozen=True, kw_only=True)
class WarpConfig:
    """Flags of a part."""

    warp: float = 2.0
    """How much."""


@pytest.fixture
def drives():
    registry = Registry("drive", "--drive", {"photon": "megatron.drives"}, call="x")

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
    for part in ("--drive wrap", "photon, impulse, warp", "--plugin", "did you mean warp?"):
        assert part in str(error.value)


def test_a_name_belongs_to_one_part(drives):
    with problem("drive warp … already … warp"):

        @drives.register("warp")
        def other(x):
            return x


def test_the_name_of_a_built_in_part_is_refused(drives):
    with problem("drive photon … own … built-in"):

        @drives.register("photon")
        def own(x):
            return x


def test_registries_know_the_names_that_flags_accept():
    for section in all_sections().values():
        for flag in flags_of(section):
            registry = flag.setting.names
            kinds = (flag.hint, *get_args(flag.hint))
            literals = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
            assert not registry or all({*names} <= {*registry.built_in} for names in literals)


def test_a_definition_that_runs_again_replaces_itself(drives):
    def define(factor):
        @drives.register("again")
        def again(x):
            return x * factor

    define(2)
    define(3)
    assert drives.get("again")(1) == 3


def test_a_built_in_part_is_registered_by_its_module_when_it_is_needed(
    tmp_path, monkeypatch, modules
):
    (tmp_path / "late_drives.py").write_text(
        "import held\n\n\n@held.DRIVES.register('ion')\ndef ion(x):\n    return x + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("drive", "--drive", {"ion": "late_drives"}, call="x")
    modules("held", DRIVES=registry)
    assert [*registry] == ["ion"]
    assert "late_drives" not in sys.modules
    assert registry.get("ion")(1) == 2
    assert not registry.is_own("ion")
    sys.modules.pop("late_drives")


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_built_in_name_of_a_flag_has_a_part(registry):
    for name, module in registry.built_in.items():
        assert not module or registry.get(name)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (lambda: 1, "too many positional arguments"),
        (lambda x, y: x, "missing a required argument: 'y'"),
        (type("Warp", (), {"__init__": lambda self, x: None}), "flags"),
    ],
)
def test_a_part_that_cannot_be_called_is_refused_when_it_is_registered(drives, part, says):
    with problem("drive slow … (x, flags=…)") as error:
        drives.register("slow", flags=WarpConfig)(part)
    assert says in str(error.value)


def test_a_hook_without_a_constructor_for_the_run_is_refused():
    with problem("hook best … Best … (run)"):

        @HOOKS.register("best")
        class Best(Hook):
            pass


def test_tokenizers_have_no_flags_of_their_own():
    with problem("tokenizer letters … flags"):
        TOKENIZERS.register("letters", flags=WarpConfig)(lambda options: options)


def test_flags_are_a_dataclass(drives):
    with problem("drive slow … flags= … @dataclass(frozen=True"):
        drives.register("slow", flags=int)(lambda x, flags: x)
