"""Programs are called by the name that was typed, and all say their version."""

import runpy
from pathlib import Path

import pytest

from megatron.common.cli import ToolParser
from megatron.common.version import VERSION

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["/venv/bin/megatron-train", "--lr", "1"], "megatron-train"),
        (["-u", "pretrain_gpt.py"], "pretrain_gpt.py"),
        (["-m", "pytest"], "pretrain_gpt.py"),
    ],
)
def test_usage_begins_with_the_name_that_was_typed(command_line, typed, name):
    command_line("/site/pretrain_gpt.py", typed=typed)
    assert ToolParser(description="").format_usage().startswith(f"usage: {name} ")


@pytest.mark.parametrize(
    "script", ["tools/text_generation_cli.py", "tools/openwebtext/group_duplicate_url.py"]
)
def test_a_program_with_arguments_of_its_own_has_a_version(script, capsys):
    main = runpy.run_path(str(REPOSITORY / script))["main"]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.endswith(f" {VERSION}\n")


def test_no_program_has_a_parser_beside_the_shared_one():
    for folder in ("tools", "tasks", "benchmarks", "megatron"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            text = file.read_text("utf-8")
            assert "ArgumentParser(description" not in text, file
