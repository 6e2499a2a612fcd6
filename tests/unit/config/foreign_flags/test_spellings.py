"""Each flag of the training programs of Megatron-LM, BigScience and deepspeedai is answered."""

from pathlib import Path

from problems import problem
from tiny import tiny_argv

from megatron.config.config import all_sections, parse_config
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.near_misses import plain

SPELLINGS = Path(__file__).with_name("spellings.txt").read_text("utf-8").split()
"""Flags of Megatron-LM's training parser that this project had no field for in 2026, the flags of the
two other programs that Megatron-LM has not, and those of published commands and of its first versions."""


def test_no_flag_of_the_three_programs_is_unknown():
    fields = {
        plain(o) for kind in all_sections().values() for f in flags_of(kind) for o in f.options
    }
    known = fields | {plain(flag.option) for flag in LEGACY}
    assert [each for each in SPELLINGS if plain(each) not in known] == []


def test_underscores_spell_the_same_flag():
    notices = parse_config(tiny_argv("--use_persistent_ckpt_worker"))[1]
    assert [notice.partition(":")[0] for notice in notices] == ["--use-persistent-ckpt-worker"]


def test_a_misspelled_flag_of_another_program_has_its_near_miss():
    with problem("did you mean --use-persistent-ckpt-worker"):
        parse_config(tiny_argv("--use-persistent-ckpt-workers"))
