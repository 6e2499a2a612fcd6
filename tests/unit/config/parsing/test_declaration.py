from dataclasses import dataclass

from problems import problem

from megatron.config.parsing.declaration import flags_of, range_problems, resolve, setting


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """Flags of a test."""

    size: int = setting(1, at_least=1)
    """Size."""

    ratios: list[float] | None = setting(None, above=0, below=1, older=("--shares",))
    """Ratios."""

    skip_bias: bool = setting(False, plan="not own.bias")
    """Skip the bias."""


@dataclass(frozen=True)
class OwnPlan:
    """Decisions of a test."""

    size: int
    bias: bool
    ratios: tuple[float, ...]
    depth: int = 0


def test_decisions_are_made_or_copied():
    plan = resolve(OwnPlan, "own", OwnConfig(size=3, ratios=[0.5]), depth=2)
    assert plan == OwnPlan(size=3, bias=True, ratios=(0.5,), depth=2)
    assert resolve(OwnPlan, "own", OwnConfig(), size=7, depth=0).size == 7


def test_a_decision_that_nothing_makes_is_an_error():
    with problem("own … depth", TypeError):
        resolve(OwnPlan, "own", OwnConfig())
    assert resolve(OwnPlan, "own", OwnConfig(), left_at_default=["depth"]).depth == 0


def test_ranges_name_flag_and_value():
    problems = range_problems(OwnConfig(size=0, ratios=[0.5, 1.0]))
    assert [*problems] == [
        "--size 0 must be at least 1",
        "--ratios 1.0 must be more than 0 and less than 1",
    ]
    assert [*range_problems(OwnConfig(size=0), "ratios")] == []


def test_flags_have_spellings_and_defaults():
    size, ratios, skip = flags_of(OwnConfig)
    assert (size.name, size.default, size.options) == ("size", 1, ("--size",))
    assert ratios.options == ("--ratios", "--shares")
    assert skip.setting.decisions == ["own.bias"]
