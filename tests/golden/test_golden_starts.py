"""What becomes of thousands of command lines: the decisions that each changes, or its problems."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from golden_files import require_golden
from options import BASE, OPTIONS, Turned

from megatron.common.errors import ConfigError
from megatron.common.registry import OBJECTIVES
from megatron.config.config import Config, all_sections, parse_config
from megatron.config.parsing.declaration import flags_of
from megatron.config.plan.plan import plan

INTEGERS = ("-1", "0", "1", "2")
NUMBERS = (*INTEGERS, "0.5", "1.5")
DEVICES = ("cpu", "cuda")
PLAIN = Turned("", "")
CURRICULUM = """{"curriculum_learning": {"enabled": true, "curriculum_type": "seqlen",
"min_difficulty": 8, "max_difficulty": 16, "schedule_type": "fixed_linear",
"schedule_config": {"total_curriculum_step": 2, "difficulty_step": 8}}}"""


def numeric_flags() -> Iterator[tuple[str, str]]:
    """Yield the field of each setting of a training run that is one number, and its flag with one."""
    for section in all_sections().values():
        for flag in flags_of(section):
            kinds = {flag.hint, *get_args(flag.hint)}
            for number in NUMBERS if float in kinds else INTEGERS if int in kinds else ():
                yield flag.name, f"{flag.options[0]} {number}"


def starts() -> Iterator[tuple[str, Turned]]:
    """Yield the words of each start, and the entry on whose base they act."""
    for name, words in numeric_flags():
        entry = OPTIONS.get(name)
        yield words, entry if isinstance(entry, Turned) else PLAIN
    for entry in OPTIONS.values():
        # Where a plugin is found depends on what other tests have imported.
        if isinstance(entry, Turned) and "--plugin" not in entry.on:
            yield entry.flags, entry


def base_of(entry: Turned) -> list[str]:
    """Return the command line on which an entry turns its option."""
    words = shlex.split(BASE)
    for flag in entry.without:
        place = words.index(flag)
        del words[place : place + 2]
    return [*words, *shlex.split(entry.on)]


def decisions(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each decision in a plan."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from decisions(part, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def outcomes(words: list[str], entry: Turned) -> list[dict[str, Any]]:
    """Return by device the decisions of a plan by path; "!" has the problems of one refused."""
    words = [word.replace("{files}", "files").replace("{run}", "run") for word in words]
    try:
        config, notices = parse_config(words, objective=entry.objective)
    except ConfigError as error:
        return [{"!": error.problems} for _ in DEVICES]
    return [outcome(config, entry, notices, device) for device in DEVICES]


def outcome(config: Config, entry: Turned, notices: tuple[str, ...], device: str) -> dict[str, Any]:
    try:
        made = plan(
            config,
            world_size=entry.ranks,
            vocab_size=60,
            device=device,
            objective=entry.objective,
        )
    except ConfigError as error:
        return {"!": error.problems}
    return dict(decisions({**made.to_dict(), "notices": [*notices, *made.notices]}))


def changes(base: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return a line for each problem, or for each decision that is not that of the base."""
    if "!" in found:
        return [f"! {problem}" for problem in found["!"]]
    return [
        f"{name} = {found.get(name, 'absent')!r}"
        for name in dict.fromkeys([*found, *base])
        if base.get(name, "absent") != found.get(name, "absent")
    ]


def test_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "flags.yaml").write_text("adam-beta1: 0.5\n")
    (files / "paths.txt").write_text('"b: 1 0:1 files/other"\n')
    (files / "curriculum.json").write_text(CURRICULUM)
    monkeypatch.chdir(tmp_path)
    OBJECTIVES.with_extensions()  # whichever another test has loaded
    bases: dict[Any, list[dict[str, Any]]] = {}
    by_base: dict[str, list[str]] = {}
    for words, entry in starts():
        base = base_of(entry)
        about = f"[{entry.objective}, {entry.ranks} processes: {shlex.join(base)}]"
        if about not in bases:
            bases[about] = outcomes(base, entry)
        cpu, cuda = map(changes, bases[about], outcomes([*base, *shlex.split(words)], entry))
        lines = by_base.setdefault(about, [])
        both = {"": cpu} if cpu == cuda else {" (cpu)": cpu, " (cuda)": cuda}
        for name, seen in both.items():
            lines += [f"{words}{name}", *(f"    {line}" for line in seen)]
    text = "\n\n".join("\n".join([about, *lines]) for about, lines in by_base.items())
    require_golden("starts.txt", text + "\n")
