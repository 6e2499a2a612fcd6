"""What an answer to a foreign flag or value says to write is accepted: flags, values, files."""

import re
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from tiny import tiny_argv

from megatron.common.errors import ConfigError
from megatron.config.config import all_sections, parse_config
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.foreign_flags.trainers import TRAINER_NAMES
from megatron.config.foreign_flags.values import FOREIGN_VALUES
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.flags import argparse_keywords, is_switch
from megatron.config.tools.preprocess import PreprocessConfig

ADVICE = {
    **{flag.option: flag.reason for flag in LEGACY if flag.refused or flag.becomes},
    **TRAINER_NAMES,
    **FOREIGN_VALUES,
}
OURS = {
    option: argparse_keywords(flag)
    for section in (*all_sections().values(), PreprocessConfig)
    for flag in flags_of(section)
    for option in flag.options
}
PROSE = ("and", "applies", "for", "or", "selects", "sets", "where", "which", "with")
"""Words that follow a flag with choices in a sentence without being one of them."""


def is_value(word, keywords):
    """Whether `word` is a value of a flag, or stands for one, such as N or 'FIRST-LAST'."""
    if is_switch(keywords):
        return False
    if re.fullmatch(r"[A-Z]+(-[A-Z]+)*", word):
        return True
    try:
        value = keywords["type"](word)
    except (ValueError, ArgumentTypeError, ConfigError):
        return False
    return value in keywords.get("choices", [value])


@pytest.mark.parametrize("name", ADVICE)
def test_flags_and_values_that_advice_names_are_accepted(name):
    for flag, word in re.findall(r"(--[a-z][\w-]*)(?: ([\w.-]+))?", ADVICE[name]):
        if flag in ("--help-all", "--num_gpus", name):  # no settings, and the flag to leave out
            continue
        assert flag in OURS
        looks_like_one = re.search(r"\d|^[A-Z]", word) and not word.startswith("--")
        has_choices = "choices" in OURS[flag] and word and word not in PROSE
        if looks_like_one or has_choices:
            assert is_value(word, OURS[flag]), f"{flag} {word}"


@pytest.mark.parametrize("name", [name for name in ADVICE if "tools/" in ADVICE[name]])
def test_files_that_advice_names_exist(name):
    root = Path(__file__).parents[4]
    for file in re.findall(r"tools/[\w/]+\.py", ADVICE[name]):
        assert (root / file).is_file()


SAMPLES = {"N": "2", "DIR": "run", "FACTOR": "2"}


def command_line(text):
    """Return the flags that `text` says to write; none where it goes on in words."""
    found = re.search(r"write (--.*?)(?: instead)?(?:[;,:]|$)", text)
    words = found[1].replace("'", "").split() if found else []
    flag = None
    for word in words:
        if word.startswith("--"):
            if flag in OURS and not is_switch(OURS[flag]):
                return []
            flag = word
        elif flag is None or not is_value(word, OURS[flag]):
            return []
        else:
            flag = None
    is_complete = flag is None or is_switch(OURS[flag])
    return [SAMPLES.get(word, word) for word in words] if is_complete else []


COMMAND_LINES = {name: words for name in ADVICE if (words := command_line(ADVICE[name]))}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_remedy_that_is_a_command_line_is_parsed(name):
    try:
        parse_config(tiny_argv(*COMMAND_LINES[name]))
    except ConfigError as error:
        assert "No such file" in str(error)  # of FILE


def test_many_remedies_are_command_lines():
    assert len(COMMAND_LINES) > 50


@pytest.mark.parametrize("name", FOREIGN_VALUES)
def test_a_foreign_value_of_our_flag_gets_its_sentence(name, tmp_path):
    flag, value = name.split()
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv(f"--{flag}", value))
    assert caught.value.problems == (f"--{flag} {value}: {FOREIGN_VALUES[name]}",)
    file = tmp_path / "flags.yaml"
    file.write_text(f"{flag}: {value}\n")
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_argv("--config", str(file)))
    assert FOREIGN_VALUES[name] in str(caught.value)
