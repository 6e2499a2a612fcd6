"""The command lines: option strings, destinations, kinds and defaults of every flag."""

import re
from dataclasses import fields
from typing import get_type_hints

import pytest
from golden import HERE, require_golden

from megatron.config.checkpoint_tools import (
    ConversionConfig,
    FileConfig,
    FilesConfig,
    LayoutConfig,
    LookConfig,
    MegatronConfig,
    PartitionsConfig,
    UniversalConfig,
)
from megatron.config.config import SECTIONS
from megatron.config.data_tools import (
    InspectConfig,
    SampleTextConfig,
    StepSamplesConfig,
    WorldConfig,
)
from megatron.config.flags import argparse_form
from megatron.config.generation import GenerationConfig
from megatron.config.hugging_face import ExportConfig, ImportConfig, TransformersConfig
from megatron.config.legacy import LEGACY
from megatron.config.merge import MergeConfig
from megatron.config.planning import PlanningConfig
from megatron.config.preprocess import PreprocessConfig, ShardConfig
from megatron.config.serving import ServingConfig
from megatron.config.tasks import HarnessConfig, TaskConfig

DATA_TOOLS = [WorldConfig, SampleTextConfig, StepSamplesConfig, InspectConfig]


def flag_lines(section):
    """Yield 'options | destination | kind | default' for every field of `section`."""
    hints = get_type_hints(section, include_extras=True)
    for field in fields(section):
        options, keywords = argparse_form(field, hints[field.name])
        kind = keywords.get("action") or keywords["type"].__name__
        if choices := keywords.get("choices"):
            kind += " of " + " ".join(map(str, choices))
        if nargs := keywords.get("nargs"):
            kind += nargs
        default = "required" if keywords.get("required") else repr(keywords.get("default"))
        if "action" in keywords:
            default = repr(field.default)
        yield f"{' '.join(options)} | {field.name} | {kind} | {default}"


def test_flags():
    lines = []
    for section in [
        *SECTIONS.values(),
        PreprocessConfig,
        ShardConfig,
        MergeConfig,
        GenerationConfig,
        ServingConfig,
        TaskConfig,
        HarnessConfig,
        *DATA_TOOLS,
        UniversalConfig,
        LookConfig,
        MegatronConfig,
        FileConfig,
        FilesConfig,
        LayoutConfig,
        ConversionConfig,
        PartitionsConfig,
        ExportConfig,
        ImportConfig,
        TransformersConfig,
        PlanningConfig,
    ]:
        lines += [f"[{section.__name__}]", *flag_lines(section), ""]
    lines.append("[legacy]")
    for flag in LEGACY:
        fate = "refused" if flag.refused else "accepted"
        lines.append(f"{flag.option} | {flag.takes} values | {fate} | {flag.reason}")
    require_golden("flags.txt", "\n".join(lines) + "\n")


def spellings():
    """Yield '| older spellings | spelling |' for every flag of training that has older ones."""
    for section in SECTIONS.values():
        hints = get_type_hints(section, include_extras=True)
        for field in fields(section):
            (option, *older), _ = argparse_form(field, hints[field.name])
            if older:
                yield [*older], f"`{option}`"


def told(refused):
    """Yield flags of other systems that share a sentence, and the sentence."""
    sentences = dict.fromkeys(flag.reason for flag in LEGACY if flag.refused == refused)
    for reason in sentences:
        flags = [flag.option for flag in LEGACY if flag.reason == reason]
        yield flags, re.sub(r"--[\w-]+", r"`\g<0>`", reason)


def table(title, column, rows):
    lines = [f"| {', '.join(f'`{flag}`' for flag in flags)} | {text} |" for flags, text in rows]
    return "\n".join([f"## {title}", "", f"| flag | {column} |", "|---|---|", *lines, ""])


def test_the_page_of_other_scripts_says_what_the_command_line_says():
    page = "../../docs/other-scripts.md"
    prose, *_ = (HERE / page).read_text(encoding="utf-8").partition("## ")
    tables = [
        table("Accepted", "what happens", told(refused=False)),
        table("Refused", "why, or what to write", told(refused=True)),
        table("Other spellings", "of", spellings()),
    ]
    require_golden(page, prose + "\n".join(tables))


def test_a_changed_interface_fails(monkeypatch):
    monkeypatch.delenv("WRITE_GOLDEN", raising=False)
    with pytest.raises(AssertionError, match=r"flags\.txt pins an interface"):
        require_golden("flags.txt", "--other")
