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
HELP = """
import contextlib, io, sys
from megatron.config.config import parse_config
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    parse_config(["--help"])
"""


def loaded(code: str, *words: str) -> str:
    """Return the extensions that a new interpreter has imported after `code`, as a list in text."""
    done = subprocess.run(
        [sys.executable, "-c", code + PRINT_LOADED, *words],
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


def test_the_help_imports_no_extension():
    assert loaded(HELP) == "[]"
