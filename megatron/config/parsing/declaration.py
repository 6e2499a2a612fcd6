"""Declaration of a setting: a field of a section, its flag, its range, and the decision it makes."""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_origin, get_type_hints, overload

from megatron.common.registry import Registry

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a field declares besides its type, its default and its help.

    Args:
        flag: its spelling, if that does not follow from the field's name.
        older: other spellings that scripts in use have.
        with_truth: whether a switch may be followed by True or False.
        repeats: whether a flag of several values can be given several times.
        names: registry of the names that it takes.
        at_least, above, at_most, below: range of the number, or of each in a list.
        remedy: end of the message about its range.
        matters: whether its range counts in every run; otherwise where its name is given.
        plan: the decisions that it makes, by section and name in the Plan, with spaces between;
            "not SECTION.NAME" for a switch that turns one off. Without one: that of its own name.
    """

    flag: str = ""
    older: tuple[str, ...] = ()
    with_truth: bool = False
    repeats: bool = False
    names: Registry[Any] | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    remedy: str = ""
    matters: bool = True
    plan: str = ""

    @property
    def decisions(self) -> list[str]:
        """The decisions that it makes, if they are named."""
        return self.plan.removeprefix("not ").split()

    @property
    def range(self) -> str:
        """The range in words; "" for any value."""
        if self.at_least is not None and self.at_most is not None:
            return f"must be from {self.at_least} to {self.at_most}"
        ends = (
            (self.at_least, "at least"),
            (self.above, "more than"),
            (self.at_most, "at most"),
            (self.below, "less than"),
        )
        words = [f"{word} {end}" for end, word in ends if end is not None]
        return f"must be {' and '.join(words)}" if words else ""

    def allows(self, value: float) -> bool:
        """Whether a number is inside the range."""
        return not (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
        )


@overload
def setting(**declared: Any) -> Any: ...


@overload
def setting(default: T, **declared: Any) -> T: ...


def setting(default: Any = MISSING, factory: Any = MISSING, **declared: Any) -> Any:
    """Return a field of a section; see `Setting` for what it can declare."""
    about = {"setting": Setting(**declared)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=about)
    return field(default=default, metadata=about)


def setting_of(field: "Field[Any]") -> Setting:
    """Return what a field declares."""
    declared: Setting = field.metadata.get("setting", _PLAIN)
    return declared


_PLAIN = Setting()


def options_of_field(field: "Field[Any]") -> list[str]:
    """Return the spellings of a field's flag, that of the help first."""
    declared = setting_of(field)
    prefix = "--no-" if field.default is True else "--"
    return [declared.flag or prefix + field.name.replace("_", "-"), *declared.older]


def range_problems(section: Any, *only: str) -> Iterator[str]:
    """Yield a message for each setting whose value is outside its range.

    Args:
        only: fields to look at; without any all that matter in every run.
    """
    own: type = type(section)
    for name, flag, declared in _ranged(own):
        asked = name in only if only else declared.matters
        given = getattr(section, name) if asked else None
        for value in given if isinstance(given, list) else (given,):
            if value is not None and not declared.allows(value):
                yield f"{flag} {value} {declared.range}{declared.remedy}"


@cache
def _ranged(section: type) -> list[tuple[str, str, Setting]]:
    declared = ((each, setting_of(each)) for each in fields(section))
    return [(f.name, options_of_field(f)[0], own) for f, own in declared if own.range]


def resolved(plan: type[T], path: str, *sections: Any, **decided: Any) -> T:
    """Return a part of the plan: each decision is in `decided`, or the value of its setting.

    Settings that are not given are off: 0, "" or ().

    Args:
        path: of this part in the Plan, such as "logging.wandb".
        sections: the settings.
    """
    values, part = dict(decided), cast(type, plan)
    for name, (number, source, kind) in _sources(part, path, tuple(map(type, sections))).items():
        if name in decided:
            continue
        if is_dataclass(kind):
            values[name] = resolved(kind, f"{path}.{name}", *sections)  # type: ignore[arg-type]
            continue
        value = getattr(sections[number], source.name)
        if setting_of(source).plan.startswith("not "):
            value = not value
        values[name] = kind() if value is None else tuple(value) if kind is tuple else value
    return plan(**values)


@cache
def _sources(
    plan: type, path: str, sections: tuple[type, ...]
) -> dict[str, tuple[int, "Field[Any]", Any]]:
    """Return by decision the number of its section, its setting, and its type."""
    settings = [(number, each) for number, own in enumerate(sections) for each in fields(own)]
    named = {name: pair for pair in settings for name in setting_of(pair[1]).decisions}
    plain = {each.name: (number, each) for number, each in settings if not setting_of(each).plan}
    found = {}
    for name, hint in get_type_hints(plan).items():
        kind = get_origin(hint) or hint
        if is_dataclass(kind):
            found[name] = (0, settings[0][1], kind)
        elif source := named.get(f"{path}.{name}") or plain.get(name):
            found[name] = (*source, kind)
    return found


def copied_settings(plan: type, path: str, sections: Sequence[type]) -> set[tuple[str, str]]:
    """Return the class of a section and the field, for each setting that a part of the plan may copy."""
    found = set()
    for name, (number, source, kind) in _sources(plan, path, tuple(sections)).items():
        if is_dataclass(kind):
            found |= copied_settings(cast(type, kind), f"{path}.{name}", sections)
        else:
            found.add((sections[number].__name__, source.name))
    return found
