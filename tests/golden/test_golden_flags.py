"""The command lines: option strings, destinations, kinds and defaults of every flag."""

from runpy import run_path

import pytest
from golden_files import HERE, require_golden
from scripts import PROGRAMS

from megatron.common.registry import OBJECTIVES
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.flags import argparse_keywords

REPOSITORY = HERE.parents[1]


def flag_lines(section):
    """Yield 'options | destination | kind | default' for every field of `section`."""
    for flag in flags_of(section):
        keywords = argparse_keywords(flag)
        kind = keywords.get("action") or keywords["type"].__name__
        if choices := keywords.get("choices"):
            kind += " of " + " ".join(map(str, choices))
        if nargs := keywords.get("nargs"):
            kind += nargs
        default = "required" if keywords.get("required") else repr(keywords.get("default"))
        if "action" in keywords:
            default = repr(flag.default)
        yield f"{' '.join(flag.options)} | {flag.name} | {kind} | {default}"


def test_flags():
    lines = []
    OBJECTIVES.with_extensions()  # whichever another test has loaded
    for section in dict.fromkeys(each for own in PROGRAMS.values() for each in own):
        lines += [f"[{section.__name__}]", *flag_lines(section), ""]
    lines.append("[legacy]")
    for flag in LEGACY:
        fate = "refused" if flag.refused else "accepted"
        if flag.becomes:
            fate = ", ".join(f"{value or 'switch'}: {to}" for value, to in flag.becomes.items())
        lines.append(f"{flag.option} | {flag.takes} values | {fate} | {flag.reason}")
    require_golden("flags.txt", "\n".join(lines) + "\n")


def test_the_page_of_flags_is_made_of_the_fields():
    page = run_path(str(REPOSITORY / "tools" / "make_flags_page.py"))["page"]
    require_golden("../../docs/flags.md", page())


def test_a_changed_interface_fails(monkeypatch):
    monkeypatch.delenv("WRITE_GOLDEN", raising=False)
    with pytest.raises(AssertionError, match=r"flags\.txt pins an interface"):
        require_golden("flags.txt", "--other")
