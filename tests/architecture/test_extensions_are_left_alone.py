"""A run of a GPT imports no extension: only what names one does."""

import subprocess
import sys

import pytest
from source import REPOSITORY
from tiny import tiny_argv

PRINT_LOADED = """
print(sorted({name.split(".")[2] for name in sys.modules if name.startswith("megatron.extensions.")}))
"""
PLAN = """
import sys
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
config, _ = parse_config(sys.argv[1:])
plan(config, world_size=1, vocab_size=11, device="cpu", objective=config.plugins.objective or "gpt")
"""
PROBLEMS = """
import sys
from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
name = sys.argv[1]
try:
    config, _ = parse_config(sys.argv[2:], objective=name)
    plan(config, world_size=1, vocab_size=11, device="cpu", objective=name)
except ConfigError as error:
    print(*error.problems, sep="\\n")
"""


def loaded(code: str, *words: str) -> str:
    """Return the extensions that a new interpreter has imported after `code`, as a list in text."""
    return printed(code + PRINT_LOADED, *words)


def printed(code: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("flags", "extensions"),
    [
        ((), "[]"),
        (("--bf16", "--lora-rank", "2", "--optimizer", "muon"), "[]"),
        (("--objective", "t5", "--decoder-seq-length", "4"), "['masked_lm', 't5']"),
        (("--objective", "bert"), "['bert', 'masked_lm']"),
    ],
)
def test_a_plan_imports_the_extensions_of_its_flags(flags, extensions):
    assert loaded(PLAN, *tiny_argv(*flags)) == extensions


def test_flags_in_a_file_import_no_extension(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("bf16: true\nbias-gelu-fusion: false\nsave: null\n")
    assert loaded(PLAN, *tiny_argv("--config", str(file))) == "[]"


@pytest.mark.parametrize(
    ("objective", "flags", "owner"),
    [
        ("bert", ("--decoder-seq-length", "4"), "pretrain_t5.py"),
        ("t5", ("--decoder-seq-length", "4", "--bert-no-binary-head"), "pretrain_bert.py"),
        ("gpt", ("--decoder-seq-length", "4"), "pretrain_t5.py"),
    ],
)
def test_flags_of_an_extension_that_is_not_loaded_are_refused(objective, flags, owner):
    flag = next(word for word in reversed(flags) if word.startswith("--"))
    assert f"{flag} is for {owner}" in printed(PROBLEMS, objective, *tiny_argv(*flags))


def test_the_help_lists_the_objectives_of_extensions():
    code = "import sys; from megatron.config.config import parse_config; parse_config(sys.argv[1:])"
    assert "bert" in printed(code, "--help-all").partition("--objective {")[2].partition("}")[0]
