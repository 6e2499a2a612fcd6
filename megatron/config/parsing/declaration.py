"""Declaration of a setting: a field of a section, its flag, its range, and the decision it makes."""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
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
            "not SECTION.NAME" for a switch that turns one off. Default: the decision of its name.
        in_weights: whether the shapes or the meaning of weights depend on it: a run with another value
            does not continue from a checkpoint, and an exporter that does not name it refuses it.
        ds_key: the key of DeepSpeed's JSON that it owns once it is given: a dotted path.
        megatron_lm: whether it is an argument of the same name and values in Megatron-LM's checkpoints.
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
    in_weights: bool = True
    ds_key: str = ""
    megatron_lm: bool = False

    @property
    def decisions(self) -> list[str]:
        """The decisions that it makes, if they are named."""
        return self.plan.removeprefix("not ").split()

    @cached_property
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


_PLAIN = Setting()


@dataclass(frozen=True)
class Flag:
    """The flag of a field of a section.

    Args:
        name: of the field.
        hint: its type.
        default: MISSING if the flag is required.
        options: spellings, the one shown in the help first.
    """

    name: str
    hint: Any
    default: Any
    setting: Setting
    options: tuple[str, ...]

    @property
    def decisions(self) -> list[str]:
        """The decisions that it makes; without any that are named, the decision of its name."""
        return self.setting.decisions or [self.name]


@cache
def flags_of(section: type) -> tuple[Flag, ...]:
    """Return the flags of a section, in the order of its fields."""
    hints, found = get_type_hints(section), []
    for each in fields(section):
        declared: Setting = each.metadata.get("setting", _PLAIN)
        prefix = "--no-" if each.default is True else "--"
        option = declared.flag or prefix + each.name.replace("_", "-")
        factory = each.default_factory
        default = each.default if factory is MISSING else factory()
        options = (option, *declared.older)
        found.append(Flag(each.name, hints[each.name], default, declared, options))
    return tuple(found)


def range_problems(section: Any, *only: str) -> Iterator[str]:
    """Yield a message for each setting whose value is outside its range.

    Args:
        only: fields to look at; without any all that matter in every run.
    """
    kind: type = type(section)
    for flag in _flags_with_range(kind):
        asked = flag.name in only if only else flag.setting.matters
        given = getattr(section, flag.name) if asked else None
        for value in given if isinstance(given, list) else (given,):
            if value is not None and not flag.setting.allows(value):
                yield f"{flag.options[0]} {value} {flag.setting.range}{flag.setting.remedy}"


@cache
def _flags_with_range(section: type) -> list[Flag]:
    return [flag for flag in flags_of(section) if flag.setting.range]


def resolve(
    plan: type[T], path: str, *sections: Any, left_at_default: Sequence[str] = (), **decided: Any
) -> T:
    """Return a part of the plan: each decision is in `decided`, or the value of its setting.

    Settings that are not given are off: 0, "" or ().

    Args:
        path: of this part in the Plan, such as "logging.wandb".
        sections: the settings.
        left_at_default: decisions that are made elsewhere.

    Raises:
        TypeError: another decision, be it one with a default, is neither decided nor the value of a setting.
    """
    values, part = dict(decided), cast(type, plan)
    for name, (number, flag, kind) in _sources(part, path, tuple(map(type, sections))).items():
        if name in decided:
            continue
        if flag is None:
            values[name] = resolve(kind, f"{path}.{name}", *sections)
            continue
        value = getattr(sections[number], flag.name)
        if flag.setting.plan.startswith("not "):
            value = not value
        values[name] = kind() if value is None else tuple(value) if kind is tuple else value
    made = {*values, *left_at_default}
    if undecided := [each.name for each in fields(part) if each.name not in made]:
        raise TypeError(f"{path}: nothing decides {', '.join(undecided)}")
    return plan(**values)


@cache
def _sources(
    plan: type, path: str, sections: tuple[type, ...]
) -> dict[str, tuple[int, Flag | None, Any]]:
    """Return by decision the number of its section, its setting, and its type.

    A part of the plan that contains decisions has no setting.
    """
    flags = [(number, flag) for number, own in enumerate(sections) for flag in flags_of(own)]
    named = {name: pair for pair in flags for name in pair[1].setting.decisions}
    plain = {pair[1].name: pair for pair in flags if not pair[1].setting.plan}
    found: dict[str, tuple[int, Flag | None, Any]] = {}
    for name, hint in get_type_hints(plan).items():
        kind = get_origin(hint) or hint
        if is_dataclass(kind):
            found[name] = (0, None, kind)
        elif source := named.get(f"{path}.{name}") or plain.get(name):
            found[name] = (*source, kind)
    return found


def copied_settings(
    plan: type, path: str, sections: Sequence[type]
) -> Iterator[tuple[Any, type, Flag]]:
    """Yield the type of each decision of a part of the plan that may be copied, its section and flag."""
    for name, (number, flag, kind) in _sources(plan, path, tuple(sections)).items():
        if flag is None:
            yield from copied_settings(kind, f"{path}.{name}", sections)
        else:
            yield get_type_hints(plan)[name], sections[number], flag
