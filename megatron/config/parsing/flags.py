"""Flags from fields: a section is a frozen dataclass, each field of it one command line flag."""

import ast
import inspect
import math
import shlex
import textwrap
from argparse import (
    SUPPRESS,
    Action,
    ArgumentTypeError,
    Namespace,
)
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import chain, pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.registry import REGISTRIES, Registry
from megatron.config.parsing.declaration import Flag, flags_of
from megatron.config.parsing.near_misses import OTHER_NAMES, plain
from megatron.config.parsing.parser import OFF, FlagParser, merge_messages
from megatron.config.parsing.titles import about, title_of

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})


@dataclass(frozen=True)
class Legacy:
    """A flag of other systems that has no field here.

    Args:
        option: its spelling.
        reason: one sentence: what happens instead, or what to write.
        takes: how many values follow it ("*": any number).
        refused: whether using it is an error; otherwise it is accepted and the reason printed.
        only_with: our flag without which it is accepted with a notice: it has no effect then.
        becomes: by its value, "" without one, our flags that are read in its place; "" for a value
            that changes nothing here. {} stands for the value, and "*" for every other value. Values
            that it leaves out are refused with the reason.
    """

    option: str
    reason: str
    takes: int | str = 0
    refused: bool = False
    becomes: Mapping[str, str] = field(default_factory=dict)
    only_with: str = ""

    def answer(self, value: str) -> tuple[str, str | None]:
        """Return what to print about the flag with `value`, and our flags; None if it is refused."""
        if not self.becomes:
            return f"{self.option}: {self.reason}", None if self.refused else ""
        given = " ".join([self.option, *value.split()])
        words = self.becomes.get(value, self.becomes.get("*"))
        if words is None:
            return f"{given}: {self.reason}", None
        read = f"read as {words.replace('{}', value)}" if words else "nothing changes here"
        return f"{given}: {read}", words


@dataclass(frozen=True)
class Notice:
    """An answer to a flag of another system that is accepted.

    Args:
        message: what it is read as, or why it changes nothing.
        read: by option of ours that is read in its place, the field that it sets, and the value.
    """

    message: str
    read: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def text(self, values: Mapping[str, Any]) -> str:
        """Return the message, with what later flags set otherwise.

        Args:
            values: by field, once all flags are read.
        """
        later = [option for option, (name, value) in self.read.items() if values[name] != value]
        return self.message + "".join(f"; a later flag overrides {option}" for option in later)


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
    own: Collection[str] = (),
    shared: Collection[str] = (),
    basics: Sequence[str] = (),
) -> Parsed:
    """Parse `argv`; return one instance per section.

    Args:
        description: the first lines of `--help`.
        own: names of the sections that `--help` lists first.
        shared: names of the sections of which `--help` lists the fields in `basics` only, and
            `--help-all` all.
        legacy: flags of other systems to refuse or to accept with a notice.
        answers: by name, what to write in place of flags of other programs; see `FlagParser`. Some
            sections have further ones.
        defaults: values by field name that replace the fields' own defaults.

    Raises:
        ConfigError: a flag is unknown, refused, missing, or its value is not of its type.
    """
    shows_legacy = "--help-legacy" in argv
    legacy = list(legacy)
    refused = {
        plain(each.option.removeprefix("--")): each.reason for each in legacy if each.refused
    }
    own_names = chain.from_iterable(
        OTHER_NAMES.get(section.__name__, {}).items() for section in sections.values()
    )
    parser = FlagParser(
        usage="%(prog)s [flags]",
        description=description,
        answers={**(answers or {}), **dict(own_names), **refused},
        others=[each.option for each in legacy],
    )
    parser.add_argument(HELP_ALL, action="help", help="List all flags." if shared else SUPPRESS)
    # Help texts are read from the source, which takes longer than all the rest.
    listed = {*sections} if HELP_ALL in argv else {*sections} - {*shared}
    if shows_legacy or HELP.isdisjoint(argv):
        listed, basics = set(), ()
    ordered = _in_order_of_help(sections, own)
    first = None
    for name in ordered:
        if basics and first is None and name not in own:
            first = parser.add_argument_group("Common flags" if own else "To begin with")
        is_shown = name in listed
        add_section(parser, sections[name], defaults or {}, first, basics, is_shown=is_shown)
    if first:  # in the order of `basics`, whichever sections its flags are of
        first._group_actions.sort(key=lambda action: basics.index(action.dest))
    if legacy:
        argv = _add_all_legacy(parser, legacy, argv, is_shown=shows_legacy)
    given = vars(parser.parse_args(list(argv), Namespace(notices=[], refusals=[])))
    built = {name: _build_section(section, given) for name, section in sections.items()}
    return Parsed(built, tuple(merge_messages([notice.text(given) for notice in given["notices"]])))


def _in_order_of_help(sections: Mapping[str, type], own: Collection[str]) -> list[str]:
    """Return the names of sections: those in `own` first, and plugins last."""
    # A clash of names is reported as the plugin's.
    others = [name for name in sections if name not in own]
    return [*own, *sorted(others, key=lambda name: is_own_section(sections[name]))]


def _add_all_legacy(
    parser: FlagParser, legacy: Sequence[Legacy], argv: Sequence[str], *, is_shown: bool
) -> list[str]:
    """Add the flags of other systems; return `argv` without those that a file turns off."""
    parser.add_argument(
        "--help-legacy",
        action="help",
        help="List the flags of other systems, with what happens or what to write instead.",
    )
    group, words = parser.add_argument_group("Flags of other systems"), list(argv)
    # There are hundreds of them: flags that are not listed or given take no time.
    given_names = {plain(word.partition("=")[0]) for word in argv}
    for flag in legacy:
        is_given = plain(flag.option) in given_names and not parser.has_option(flag.option)
        if is_given and flag.only_with and plain(flag.only_with) not in given_names:
            reason = f"it has no effect without {flag.only_with}"
            flag = replace(flag, refused=False, reason=reason)
        if is_shown or is_given:
            _add_legacy(group, flag, is_shown=is_shown)
            words = [word for word in words if not _turns_off(word, flag)]
    return words


def _build_section(section: type, given: Mapping[str, Any]) -> Any:
    try:
        return section(**{field.name: given[field.name] for field in fields(section)})
    except (ValueError, TypeError) as error:
        if not is_own_section(section):
            raise
        # A check that a plugin's dataclass makes of its flags.
        raise ConfigError(f"{section.__name__}: {error}") from error


def is_own_section(section: type) -> bool:
    """Whether a section of flags is a plugin's."""
    return section in chain.from_iterable(map(Registry.sections, REGISTRIES))


def add_section(
    parser: FlagParser,
    section: type,
    defaults: Mapping[str, Any] | None = None,
    first: Any = None,
    basics: Collection[str] = (),
    *,
    is_shown: bool = True,
) -> None:
    """Add one flag per field of `section`, in a group headed by its title.

    Args:
        first: the group of the fields in `basics`, if there is one.
        is_shown: whether the help lists the other fields.
    """
    shown = (title_of(section), about(section)) if is_shown else ()
    # Not to the parser itself, which would prepare a help text for each flag.
    group = parser.add_argument_group(*shown)
    is_own = is_own_section(section)
    if is_own:
        raise_if_any(_own_problems(parser, section))
    for flag in flags_of(section):
        keywords = argparse_keywords(flag)
        if is_own and "required" in keywords:
            # Only if the part is chosen: see `plugin_problems`.
            keywords["required"] = False
        if defaults and flag.name in defaults:
            keywords |= {"required": False, "default": defaults[flag.name]}
            if is_switch(keywords):
                del keywords["required"]
        is_first = first is not None and flag.name in basics
        is_listed = is_shown or is_first
        keywords |= _help_keywords(flag, section, keywords) if is_listed else {"help": SUPPRESS}
        (first if is_first else group).add_argument(*flag.options, dest=flag.name, **keywords)


def is_switch(keywords: Mapping[str, Any]) -> bool:
    """Whether a flag with these keywords of `add_argument` takes no value."""
    return "action" in keywords and keywords["action"].startswith("store")


def _help_keywords(flag: Flag, section: type, keywords: Mapping[str, Any]) -> dict[str, str]:
    """Return the keywords of `add_argument` that only the help needs."""
    text = field_docstrings(section)[flag.name]
    if default := default_text(keywords):
        text += f" (default: {default})"
    found = {"help": text.replace("%", "%%")}
    if is_switch(keywords) or "choices" in keywords or keywords.get("nargs") == "?":
        return found
    return found | {"metavar": _METAVARS.get(keywords["type"]) or _last_word(flag.name)}


def _own_problems(parser: FlagParser, section: type) -> Iterator[str]:
    """Yield why a plugin's section does not make flags."""
    helps = field_docstrings(section)
    for flag in flags_of(section):
        where = f"{section.__module__}.{section.__qualname__}.{flag.name}"
        if flag.name not in helps:
            yield f"{where}: a flag needs a help text, a string literal below the field"
        try:
            keywords = argparse_keywords(flag)
        except (ValueError, TypeError):
            keywords = {"type": object}
        kind = keywords.get("type", bool)
        if isinstance(kind, type) and kind not in (bool, int, float, str):
            yield (
                f"{where}: {flag.hint} cannot be a flag; flags are bool, int, float, str, a "
                "Literal or a list of these, or None"
            )
        taken = [each for each in flag.options if parser.has_option(each)]
        if taken or parser.has_field(flag.name):
            option = taken[0] if taken else f"--{flag.name.replace('_', '-')}"
            yield f"{where}: there is a flag {option} already: rename the field"


def default_text(keywords: Mapping[str, Any]) -> str:
    """Return the default of a flag for its help; nothing if it is none, or part of the text."""
    default = keywords.get("default")
    if "action" in keywords or default is None or default is False or default in ("", []):
        return ""
    words = default if isinstance(default, list) else [default]
    return " ".join(str(word).removesuffix(".0") for word in words)


def argparse_keywords(flag: Flag) -> dict[str, Any]:
    """Return the keywords of a flag for `add_argument`."""
    hint, default, registry = flag.hint, flag.default, flag.setting.names
    if get_origin(hint) in (Union, UnionType):
        (hint,) = {*get_args(hint)} - {NoneType}
    if hint is bool and flag.setting.with_truth:
        return {"nargs": "?", "const": True, "default": default, "type": truth}
    if hint is bool:
        return {"action": "store_false" if default is True else "store_true"}
    required = default is MISSING
    keywords: dict[str, Any] = {"required": required, "default": None if required else default}
    if flag.setting.repeats:
        keywords["action"] = "extend"
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        kind: Callable[[str], Any] = type(choices[0])
        if registry:
            choices = (*choices, *filter(registry.is_own, registry))
            kind = _name_in(registry, choices)
        return keywords | {"choices": choices, "type": kind}
    if registry:
        kind = _name_in(registry, registry)
        keywords |= {"choices": registry} if registry.built_in else {}
        return keywords | {"type": kind} | ({"nargs": "+"} if get_origin(hint) is list else {})
    if get_origin(hint) is list:
        return keywords | {"nargs": "+", "type": get_args(hint)[0]}
    return keywords | {"type": finite if hint is float else hint}


def _name_in(
    registry: Registry[Any], names: Collection[str] | Registry[Any]
) -> Callable[[str], str]:
    """Return the argparse type of the names of registered parts."""

    def name(text: str) -> str:
        # A word of a file knows its line, which a config does not keep.
        found = str(text if text in names else registry.canonical_name(text, names))
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
    """Return {field name: the string literal written under it}, base dataclasses included.

    The text describes the flag: under a switch that is on by default, what its --no-… flag does.

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
    for declared, below in pairwise(definition.body):
        match declared, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = inspect.cleandoc(doc)
    return docs


def given_options(section: Any) -> list[str]:
    """Return the options of a section's fields that have another value than their default."""
    kind: type = type(section)
    changed = (flag for flag in flags_of(kind) if getattr(section, flag.name) != flag.default)
    return [flag.options[0] for flag in changed]


def options_of(sections: Mapping[str, type]) -> dict[str, str]:
    """Return the option of each field, as the help spells it."""
    return {f.name: f.options[0] for section in sections.values() for f in flags_of(section)}


def switch_words(sections: Mapping[str, type]) -> dict[str, tuple[list[str], list[str]]]:
    """Return, by option with hyphens, the words that stand for "on" and for "off" in a file of flags.

    A switch that is on by default can be named by its field: off is then its `--no-…` option.
    """
    words: dict[str, tuple[list[str], list[str]]] = {}
    for flag in (each for section in sections.values() for each in flags_of(section)):
        words |= {plain(option): ([option], []) for option in flag.options}
        if flag.default is True:
            words[plain(f"--{flag.name}")] = ([], [flag.options[0]])
    return words


class _LegacyUse(Action):
    """Adds the answer to a flag of other systems to the refusals or the notices, and reads our flags."""

    def __init__(self, *args: Any, flag: Legacy, **keywords: Any):
        super().__init__(*args, **keywords)
        self._flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        """Add it."""
        given = values if isinstance(values, list) else [values] if values else []
        message, words = self._flag.answer(" ".join(given))
        if words is None:
            namespace.refusals.append(message)
            return
        notice = Notice(message)
        namespace.notices.append(notice)
        read = [each for word in shlex.split(words) for each in (given if word == "{}" else [word])]
        _, unknown = parser.parse_known_args(read, namespace)
        for option in (word for word in read if parser.has_option(word)):
            field_name = parser.field_set_by(option)
            notice.read[option] = field_name, getattr(namespace, field_name)
        if unknown:
            namespace.refusals.append(
                f"{' '.join([self._flag.option, *given])}: {' '.join(unknown)} is left over"
            )


def _turns_off(word: str, flag: Legacy) -> bool:
    """Whether a file of flags turns off a flag of another system, which is so here anyway."""
    option, _, value = word.partition("=")
    return value == OFF and OFF not in flag.becomes and plain(option) == plain(flag.option)


def _add_legacy(group: Any, flag: Legacy, *, is_shown: bool) -> None:
    group.add_argument(
        flag.option,
        action=_LegacyUse,
        flag=flag,
        nargs=flag.takes,
        metavar="VALUE",
        dest="notices",
        help=flag.reason.replace("%", "%%") if is_shown else SUPPRESS,
    )
