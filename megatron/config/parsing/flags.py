"""Flags from fields: a section is a frozen dataclass, each field of it one command line flag."""

import ast
import inspect
import math
import textwrap
from argparse import (
    SUPPRESS,
    Action,
    ArgumentTypeError,
    Namespace,
)
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.registry import REGISTRIES, Registry
from megatron.config.parsing.declaration import options_of_field, setting_of
from megatron.config.parsing.near_misses import plain
from megatron.config.parsing.parser import FlagParser
from megatron.config.parsing.titles import BASICS, about, title_of


@dataclass(frozen=True)
class Legacy:
    """A flag of other systems that has no field here.

    Args:
        option: its spelling.
        reason: one sentence: what happens instead, or what to write.
        takes: how many values follow it ("*": any number).
        refused: whether using it is an error; otherwise it is accepted and the reason printed.
    """

    option: str
    reason: str
    takes: int | str = 0
    refused: bool = False


@dataclass(frozen=True)
class Parsed:
    """A parsed command line."""

    sections: dict[str, Any]  # section name -> instance of its dataclass
    notices: tuple[str, ...]  # one sentence for each accepted flag without effect


def parse_sections(
    argv: Sequence[str],
    sections: Mapping[str, type],
    *,
    description: str = "",
    legacy: Iterable[Legacy] = (),
    answers: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Parsed:
    """Parse `argv`; return one instance per section.

    Args:
        description: the first lines of `--help`.
        legacy: flags of other systems to refuse or to accept with a notice.
        answers: by name, what to write in place of flags of other programs; see `FlagParser`.
        defaults: values by field name that replace the fields' own defaults.

    Raises:
        ConfigError: a flag is unknown, refused, missing, or its value is not of its type.
    """
    shows_legacy = "--help-legacy" in argv
    legacy = list(legacy)
    refused = {
        plain(each.option.removeprefix("--")): each.reason for each in legacy if each.refused
    }
    parser = FlagParser(
        usage="%(prog)s [flags]", description=description, answers={**(answers or {}), **refused}
    )
    trains = any("num_layers" in section.__annotations__ for section in sections.values())
    first = parser.add_argument_group("To begin with") if trains and not shows_legacy else None
    # Those of plugins last, so that a clash of names is theirs.
    for section in sorted(sections.values(), key=is_own_section):
        add_section(parser, section, defaults or {}, first=first, is_shown=not shows_legacy)
    if legacy:
        parser.add_argument(
            "--help-legacy",
            action="help",
            help="List the flags of other systems, with what happens or what to write instead.",
        )
        others = parser.add_argument_group("Flags of other systems")
        for flag in legacy:
            _add_legacy(others, flag, is_shown=shows_legacy)
    # The first group has the order of BASICS, whichever sections its flags are of.
    if first:
        first._group_actions.sort(key=lambda action: BASICS.index(action.dest))
    given = vars(parser.parse_args(list(argv), Namespace(notices=[], refusals=[])))
    built = {name: _built(section, given) for name, section in sections.items()}
    return Parsed(built, tuple(dict.fromkeys(given["notices"])))


def _built(section: type, given: Mapping[str, Any]) -> Any:
    try:
        return section(**{field.name: given[field.name] for field in fields(section)})
    except (ValueError, TypeError) as error:
        if not is_own_section(section):
            raise
        # A check that a plugin's dataclass makes of its flags.
        raise ConfigError(f"{section.__name__}: {error}") from error


def is_own_section(section: type) -> bool:
    """Whether a section of flags is a plugin's."""
    return any(section in registry.sections() for registry in REGISTRIES)


def add_section(
    parser: FlagParser,
    section: type,
    defaults: Mapping[str, Any] | None = None,
    *,
    first: Any = None,
    is_shown: bool = True,
) -> None:
    """Add one flag per field of `section`, in a group headed by its title.

    Args:
        first: the group of the flags that a beginner needs, if there is one.
        is_shown: whether the help lists them.
    """
    group = parser.add_argument_group(title_of(section), about(section)) if is_shown else parser
    hints = get_type_hints(section)
    helps = field_docstrings(section)
    is_own = is_own_section(section)
    if is_own:
        raise_if_any(_own_problems(parser, section, hints, helps))
    for field in fields(section):
        options, keywords = argparse_form(field, hints[field.name])
        if is_own and "required" in keywords:
            # Only if the part is chosen: see `plugin_problems`.
            keywords["required"] = False
        is_switch = keywords.get("action", "").startswith("store")
        if defaults and field.name in defaults:
            keywords |= {"required": False, "default": defaults[field.name]}
            if is_switch:
                del keywords["required"]
        prefix = "Turn off: " if field.default is True else ""
        help_text = (prefix + helps[field.name]).replace("%", "%%")
        if not (is_switch or "choices" in keywords or keywords.get("nargs") == "?"):
            keywords["metavar"] = _METAVARS.get(keywords["type"]) or _last_word(field.name)
        if shown := default_text(keywords):
            help_text += f" (default: {shown})".replace("%", "%%")
        of_beginners = first is not None and field.name in BASICS
        (first if of_beginners else group).add_argument(
            *options, dest=field.name, help=help_text if is_shown else SUPPRESS, **keywords
        )


def _own_problems(
    parser: FlagParser, section: type, hints: Mapping[str, Any], helps: Mapping[str, str]
) -> Iterator[str]:
    """Yield why a plugin's section does not make flags."""
    for field in fields(section):
        where = f"{section.__module__}.{section.__qualname__}.{field.name}"
        if field.name not in helps:
            yield f"{where}: a flag needs a help text, a string literal below the field"
        try:
            options, keywords = argparse_form(field, hints[field.name])
        except (ValueError, TypeError):
            options, keywords = [], {"type": object}
        kind = keywords.get("type", bool)
        if isinstance(kind, type) and kind not in (bool, int, float, str):
            yield (
                f"{where}: {hints[field.name]} cannot be a flag; flags are bool, int, float, str, a "
                "Literal or a list of these, or None"
            )
        taken = [each for each in options if parser.has_option(each)]
        if taken or parser.has_field(field.name):
            flag = taken[0] if taken else f"--{field.name.replace('_', '-')}"
            yield f"{where}: there is a flag {flag} already: rename the field"


def default_text(keywords: Mapping[str, Any]) -> str:
    """Return the default of a flag for its help; nothing if it is none, or part of the text."""
    default = keywords.get("default")
    if "action" in keywords or default is None or default is False or default in ("", []):
        return ""
    words = default if isinstance(default, list) else [default]
    return " ".join(str(word).removesuffix(".0") for word in words)


def field_default(field: "Field[Any]") -> Any:
    """Return the default of a field; MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def argparse_form(field: "Field[Any]", hint: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the option strings of `field` and its keywords for `add_argument`."""
    declared, options = setting_of(field), options_of_field(field)
    registry = declared.names
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not NoneType)
    if hint is bool and declared.with_truth:
        return options, {"nargs": "?", "const": True, "default": field.default, "type": truth}
    if hint is bool:
        return options, {"action": "store_false" if field.default is True else "store_true"}
    default = field_default(field)
    required = default is MISSING
    keywords: dict[str, Any] = {"required": required, "default": None if required else default}
    if declared.repeats:
        keywords["action"] = "extend"
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        kind: Callable[[str], Any] = type(choices[0])
        if registry:
            choices = (*choices, *filter(registry.is_own, registry))
            kind = _name_in(registry, choices)
        return options, keywords | {"choices": choices, "type": kind}
    if registry:
        kind = _name_in(registry, registry)
        keywords |= {"choices": registry} if registry.built_in else {}
        return options, keywords | {"type": kind} | (
            {"nargs": "+"} if get_origin(hint) is list else {}
        )
    if get_origin(hint) is list:
        return options, keywords | {"nargs": "+", "type": get_args(hint)[0]}
    return options, keywords | {"type": finite if hint is float else hint}


def _name_in(
    registry: Registry[Any], names: Collection[str] | Registry[Any]
) -> Callable[[str], str]:
    """Return the argparse type of the names of registered parts."""

    def name(text: str) -> str:
        # A word of a file knows its line, which a config does not keep.
        found = str(text if text in names else registry.spelled(text, names))
        if found not in names:
            raise ConfigError(registry.unknown(text, names))
        return found

    return name


def finite(text: str) -> float:
    """Parse a finite number.

    Raises:
        ArgumentTypeError: `text` is not a number, or not finite.
    """
    number = finite_or_none(text)
    if number is None:
        raise ArgumentTypeError(f"{text!r} is not a finite number")
    return number


_METAVARS: Mapping[Any, str] = {int: "N", finite: "X"}


def _last_word(name: str) -> str:
    return name.rpartition("_")[2].upper()


def finite_or_none(text: str) -> float | None:
    """Parse a finite number; None when `text` is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def truth(text: str) -> bool:
    """Parse a boolean.

    Raises:
        ArgumentTypeError: `text` is neither yes nor no.
    """
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ArgumentTypeError(f"{text!r} is neither True nor False")
    return words[text.lower()]


@cache  # reading the source takes most of the time of parsing
def field_docstrings(section: type) -> Mapping[str, str]:
    """Return {field name: the string literal written under it}, with those of base dataclasses.

    Raises:
        ConfigError: the source of the class cannot be read.
    """
    try:
        source = inspect.getsource(section)
    except OSError as error:
        raise ConfigError(
            f"{section.__module__}.{section.__qualname__}: its flags need help texts, and its source "
            "cannot be read: define it in a file"
        ) from error
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    bases = filter(is_dataclass, section.__bases__)
    docs = {name: doc for base in bases for name, doc in field_docstrings(base).items()}
    for field, below in pairwise(definition.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = inspect.cleandoc(doc)
    return docs


def given_options(section: Any) -> list[str]:
    """Return the options of a section's fields that have another value than their default."""
    return [
        options_of_field(field)[0]
        for field in fields(section)
        if getattr(section, field.name) != field_default(field)
    ]


def options_of(sections: Mapping[str, type]) -> dict[str, str]:
    """Return the option of each field, as the help spells it."""
    found = {}
    for section in sections.values():
        hints = get_type_hints(section)
        for field in fields(section):
            found[field.name] = argparse_form(field, hints[field.name])[0][0]
    return found


def switch_words(sections: Mapping[str, type]) -> dict[str, tuple[list[str], list[str]]]:
    """Return, by option with hyphens, the words that stand for "on" and for "off" in a file of flags.

    A switch that is on by default can be named by its field: off is then its `--no-…` option.
    """
    words: dict[str, tuple[list[str], list[str]]] = {}
    for section in sections.values():
        hints = get_type_hints(section)
        for field in fields(section):
            options, _ = argparse_form(field, hints[field.name])
            words |= {plain(option): ([option], []) for option in options}
            if field.default is True:
                words[plain(f"--{field.name}")] = ([], options[:1])
    return words


def _add_legacy(group: Any, flag: Legacy, *, is_shown: bool) -> None:
    class Used(Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            messages = namespace.refusals if flag.refused else namespace.notices
            messages.append(f"{flag.option}: {flag.reason}")

    group.add_argument(
        flag.option,
        action=Used,
        nargs=flag.takes,
        metavar="VALUE",
        dest="notices",
        help=flag.reason.replace("%", "%%") if is_shown else SUPPRESS,
    )
