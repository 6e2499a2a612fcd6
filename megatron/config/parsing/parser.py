"""Parser of command lines: all problems at once, with locations in files of flags and near misses."""

import os.path
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise, zip_longest
from typing import Any, NoReturn

from megatron.common.cli import ToolParser
from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.extensions import extension_sections
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.near_misses import answer_for, field_of, plain

_MOST_PROBLEMS = 50
"""Problems of files that are reported; looking for near misses takes time for each."""


def merge_messages(messages: Sequence[str]) -> list[str]:
    """Merge messages of the form FLAG: TEXT that have the same text into FLAG, FLAG: TEXT."""
    flags: dict[str, list[str]] = {}
    for message in dict.fromkeys(messages):
        flag, _, text = message.partition(": ")
        flags.setdefault(text, []).append(flag)
    return [f"{', '.join(each)}: {text}" for text, each in flags.items()]


class FileWord(str):
    """A word of a command line that comes from a file of flags."""

    __slots__ = ("key", "location")

    key: str  # as the file has it
    location: str  # the file and the line, for messages

    def __new__(cls, word: str, key: str, location: str) -> "FileWord":
        """Return `word` with its key and its location."""
        made = super().__new__(cls, word)
        made.key, made.location = key, location
        return made


OFF = "false"
"""Value of a flag that a file turns off, where nothing declares what turns it off."""

Given = Mapping[str, str | None]
"""The last value of each option of a command line, by its name with underscores; None without one."""


def peek(argv: Sequence[str]) -> Given:
    """Return the options in `argv`, without parsing the rest.

    For what has to be known before flags can be parsed: which parts and which files have some.
    """
    found: dict[str, str | None] = {}
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            is_value = bool(following) and not following.startswith("--")
            given = value if equals else following if is_value else None
            found[field_of(option)] = given
    return found


class FlagParser(ToolParser):
    """Parser of flags that raises instead of exiting, so that one rank of many can print the message.

    Args:
        answers: by name without dashes, what to write in place of flags of other programs; by "NAME
            VALUE" in place of a value of a flag, or of any value of a switch.
        others: further flags that are known, whether the parser has them or not.
    """

    def __init__(
        self,
        *,
        description: str | None,
        usage: str | None = None,
        answers: Mapping[str, str] | None = None,
        others: Sequence[str] = (),
    ):
        super().__init__(description=description, usage=usage)
        self._answers = dict(answers or {})
        self._others = others

    def has_option(self, option: str) -> bool:
        """Whether a flag is spelled `option`."""
        return option in self._option_string_actions

    def field_set_by(self, option: str) -> str:
        """Return the field that the flag `option` sets."""
        return self._option_string_actions[option].dest

    def has_field(self, name: str) -> bool:
        """Whether a flag sets the field `name`."""
        return any(action.dest == name for action in self._actions)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message."""
        # argparse's message about a switch with a value.
        clear = "takes no value (in a file: true or false), not"
        raise ConfigError(message.replace("ignored explicit argument", clear))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words `args` into `namespace`.

        Raises:
            ConfigError: lists every problem of the words.
        """
        args = [self._canonical_word(word) for word in args or ()]
        required = [action for action in self._actions if action.required]
        for action in required:
            # Listed below, with what may be a misspelling of it.
            action.required = False
        words, problems = self._without_problems(args)
        try:
            given, unknown = self.parse_known_args(words, namespace)
        except ConfigError as error:
            # argparse stops at its first error: further errors are found flag by flag.
            words, more = self._without_errors(words)
            if not more:
                raise ConfigError(*problems, *error.problems) from error
            problems += more
            given, unknown = self.parse_known_args(words, Namespace(notices=[], refusals=[]))
        present = {word.partition("=")[0] for word in args}
        missing = [
            action.option_strings[0]
            for action in required
            if getattr(given, action.dest) is None and present.isdisjoint(action.option_strings)
        ]
        raise_if_any(
            [
                *problems,
                *merge_messages(given.refusals),
                *self._contradictions(args),
                *self._unknown(unknown, args),
                *(
                    [f"the following arguments are required: {', '.join(missing)}"]
                    if missing
                    else []
                ),
            ]
        )
        return given

    def _canonical_word(self, word: str) -> str:
        """Return `word` with its flag as that is declared: underscores and hyphens are the same."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or self.has_option(name):
            return word
        known = next((o for o in self._option_string_actions if plain(o) == plain(name)), name)
        spelled = f"{known}{equals}{value}"
        return FileWord(spelled, word.key, word.location) if isinstance(word, FileWord) else spelled

    def _contradictions(self, words: Sequence[str]) -> Iterator[str]:
        """Yield flags given under two spellings with different values; files are overridden."""
        typed = peek([word for word in words if not isinstance(word, FileWord)])
        for action in self._actions:
            if action.nargs is not None or len(action.option_strings) == 1:
                continue
            found = {each: typed.get(field_of(each)) for each in action.option_strings}
            given = {option: value for option, value in found.items() if value is not None}
            if len(set(given.values())) > 1:
                flags = [f"{option} {value}" for option, value in given.items()]
                yield f"{' and '.join(flags)} are one flag: give one of them"

    def _without_problems(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Return `words` without wrong entries of files, and the problems of these entries."""
        kept, problems = [], []
        for (location, _), group in groupby(words, key=_entry_of):
            entry = list(group)
            found = [*self._file_problems(location, entry)] if location else []
            problems += found
            kept += [] if found else entry
            if len(problems) >= _MOST_PROBLEMS:
                raise ConfigError(*problems, "there may be further problems")
        return kept, problems

    def _without_errors(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Return `words` without the flags that argparse refuses, and its messages."""
        starts = [i for i, word in enumerate(words) if word.startswith("--")]
        kept = words[: starts[0]] if starts else []
        problems: list[str] = []
        for start, stop in pairwise([*starts, len(words)]):
            entry = words[start:stop]
            try:
                self.parse_known_args(entry, Namespace(notices=[], refusals=[]))
            except ConfigError as error:
                problems += self._foreign_values(entry) or [
                    each + _dash_advice(entry, each) for each in error.problems
                ]
            else:
                kept += entry
        return kept, problems

    def _file_problems(self, location: str, entry: Sequence[Any]) -> Iterator[str]:
        """Yield problems of the words at `location` of a file."""
        key = entry[0].key
        try:
            given, unknown = self.parse_known_args(entry, Namespace(notices=[], refusals=[]))
        except ConfigError as error:
            if foreign := self._foreign_values(entry):
                yield from (f"{location}: {problem}" for problem in foreign)
                return
            wrong = str(error).removeprefix("argument ").partition(": ")[2] or str(error)
            answer = self._answers.get(f"{plain(key)} VALUE")
            yield f"{location}: {key}: {wrong}{f'; {answer}' if answer else ''}"
            return
        yield from (f"{location}: {refusal}" for refusal in given.refusals)
        option = entry[0].partition("=")[0]
        if unknown and self.has_option(option):
            yield f"{location}: {key} takes fewer values; {' '.join(unknown)} is too many"
        elif unknown:
            # A key has no dashes.
            answer = re.sub("^(did you mean |write )--", r"\1", self._answer(option))
            yield f"{location}: unknown key {key}{answer and f'; {answer}'}"

    def _foreign_values(self, entry: Sequence[str]) -> list[str]:
        """Return advice about values of a refused flag that come from other programs."""
        option, equals, value = entry[0].partition("=")
        found = (
            (each, self._answers.get(f"{option.removeprefix('--')} {each}"))
            for each in ([value] if equals else entry[1:])
        )
        return [f"{option} {each}: {answer}" for each, answer in found if answer]

    def _answer(self, option: str) -> str:
        names = [*self._option_string_actions, *self._others]
        if self.has_field("num_layers"):  # of a run, which extensions may take part in
            sections = extension_sections().values()
            names += (o for each in sections for flag in flags_of(each) for o in flag.options)
        known = [name.removeprefix("--") for name in names]
        known = [name for name in known if name not in self._answers]
        return answer_for(option.removeprefix("--"), self._answers, known)

    def _unknown(self, words: Sequence[str], typed: Sequence[str]) -> Iterator[str]:
        """Yield a message for each unknown flag, or for the first value that belongs to none.

        Args:
            typed: all words of the command line.
        """
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        for flag in flags:
            yield f"unknown flag {flag}; {self._answer(flag) or '--help-all lists all flags'}"
        if words and not flags:
            yield self._stray(words[0], typed)

    def _stray(self, value: str, typed: Sequence[str]) -> str:
        """Return the message about a value that belongs to no flag."""
        if not value.strip():
            return (
                "a word is only blanks: take out the space after a backslash at the end of a line"
            )
        for switch, following in pairwise(typed):
            action = self._option_string_actions.get(switch)
            if following == value and action and action.nargs == 0:
                answer = self._answers.get(f"{switch.removeprefix('--')} VALUE")
                return f"{switch} takes no value, not {value}; {answer or _without(switch, value)}"
        return f"unexpected argument {value}; write {self._with_flag(value)}"

    def _with_flag(self, value: str) -> str:
        """Return what to write in place of a value without a flag."""
        if value.endswith((".yaml", ".yml")) and self.has_option("--config"):
            return f"--config {value}"
        if " " in value and self.has_option("--prompt"):
            return f"--prompt {shlex.quote(value)}"
        if self.has_option("--load") and self.has_option("--save") and os.path.isdir(value):
            return f"--load {value}, and --save for the output"
        return "it as --NAME VALUE"


def _without(switch: str, value: str) -> str:
    """Return advice about a switch that was given a value."""
    is_off = value.lower() in ("false", "no", "0", "off")
    return f"leave {switch if is_off else value} out"


def _dash_advice(entry: Sequence[str], problem: str) -> str:
    """Return advice about a value that begins with -, which argparse does not take for one."""
    if len(entry) == 1 or not problem.endswith("expected one argument"):
        return ""
    return f"; write {shlex.quote(f'{entry[0]}={entry[1]}')} for a value that begins with -"


def _entry_of(word: str) -> tuple[str, str]:
    """Return the location and the key of `word` in a file of flags; ("", "") without a file."""
    return (word.location, word.key) if isinstance(word, FileWord) else ("", "")
