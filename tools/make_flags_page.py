#!/usr/bin/env python
"""Print docs/flags.md, the list of all flags, from the fields in megatron/config/."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.common.extensions import extension_names, load_extension
from megatron.config.config import SECTIONS
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.flags import (
    argparse_keywords,
    default_text,
    field_docstrings,
    is_switch,
)
from megatron.config.parsing.titles import about, title_of
from tools.programs import PROGRAMS

INTRODUCTION = """\
# Flags

`python PROGRAM --help` prints what this page lists; `python tools/make_flags_page.py` writes it from \
the dataclasses in `megatron/config/`. How flags are given, also in files: \
[configuration.md](configuration.md).

The middle column is the type of the value, then its default; without one there, the default is in \
the text. A switch has no value, except where noted. Paths and names are *texts*; *texts*, *integers* and *numbers* are one or more, with spaces \
between. Other spellings of a flag are listed below it and mean the same.
"""

OTHER_SYSTEMS = """\
## Flags of other systems

A training command of Megatron-LM, of BigScience's Megatron-DeepSpeed or of DeepSpeed's own fork \
runs here as it is. A flag that decides nothing here is accepted, and the log says why. A flag \
for something that is not supported here is refused before anything starts, with what to write \
instead: all such flags of a command line at once, and unknown flags with the nearest known one.
"""

TYPES = {
    "int": ("integer", "integers"),
    "finite": ("number", "numbers"),
    "str": ("text", "texts"),
    "truth": ("switch, or True or False", ""),
}
"""Names of one value and of several, by the function that parses one."""


def main(argv: Sequence[str]) -> None:
    """Print the page.

    Raises:
        ConfigError: a word was given.
    """
    if argv:
        raise ConfigError(f"{argv[0]}: this program takes no flags and prints the page")
    print(page(), end="")


def page() -> str:
    """Return the text of the page; as --help, it names the parts of all extensions."""
    for name in extension_names():
        load_extension(name)
    sections = list(dict.fromkeys(each for own in PROGRAMS.values() for each in own))
    return "\n".join(
        [
            INTRODUCTION,
            *_program_lines(),
            *(line for section in sections for line in _section_lines(section)),
            OTHER_SYSTEMS,
            *_legacy_lines("### Accepted", "what happens", refused=False),
            *_legacy_lines("### Refused", "why, or what to write", refused=True),
        ]
    )


def _program_lines() -> Iterator[str]:
    training = list(SECTIONS.values())
    yield "## Programs\n"
    yield f"*Training* stands for {', '.join(map(_link, training))}.\n"
    yield "| program | its sections |"
    yield "|---|---|"
    for program, sections in PROGRAMS.items():
        own = [section for section in sections if section not in training]
        if set(training) <= set(sections):
            names = ["*training*", *map(_link, own)]
        else:
            names = [_link(section) for section in sections]
        yield f"| `{program}` | {', '.join(names)} |"
    yield ""


def _section_lines(section: type) -> Iterator[str]:
    yield f"## {title_of(section)}\n"
    yield f"{_text(about(section))}\n"
    yield "| flag | value | meaning |"
    yield "|---|---|---|"
    helps = field_docstrings(section)
    for flag in flags_of(section):
        option, *older = flag.options
        names = "<br>".join([f"`{option}`", *(f"or `{spelling}`" for spelling in older)])
        turned_off = "Turn off: " if flag.default is True else ""
        meaning = turned_off + _text(helps[flag.name])
        yield f"| {names} | {_value(argparse_keywords(flag))} | {meaning} |"
    yield ""


def _value(keywords: dict[str, Any]) -> str:
    """Return the type of a flag's value and its default, in words."""
    if is_switch(keywords):
        return "switch"
    several = keywords.get("nargs") == "+"
    if choices := keywords.get("choices"):
        kind = " or ".join(f"`{choice}`" for choice in choices)
    else:
        kind = TYPES.get(keywords["type"].__name__, TYPES["str"])[several]
    if keywords.get("required"):
        return f"{kind}; **required**"
    shown = default_text(keywords)
    return f"{kind}; " + " ".join(f"`{word}`" for word in shown.split()) if shown else kind


def _legacy_lines(heading: str, column: str, *, refused: bool) -> Iterator[str]:
    """Yield the table of flags without a field; those that share a sentence share a line."""
    of_reason: dict[str, list[str]] = {}
    for flag in LEGACY:
        if flag.refused == refused:
            of_reason.setdefault(flag.reason, []).append(f"`{flag.option}`")
    yield f"{heading}\n"
    yield f"| flag | {column} |"
    yield "|---|---|"
    for reason, flags in of_reason.items():
        yield f"| {', '.join(flags)} | {_text(reason)} |"
    yield ""


def _link(section: type) -> str:
    title = title_of(section)
    return f"[{title}](#{title.lower().replace(' ', '-')})"


def _text(text: str) -> str:
    """Return `text` in one line of Markdown: flags and tokens as code, nothing of it a mark."""
    line = re.sub(r"([|*])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w-])--[\w-]*\w|<\w+>", r"`\g<0>`", line)


if __name__ == "__main__":
    run_tool(main)
