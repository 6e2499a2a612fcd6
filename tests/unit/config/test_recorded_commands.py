"""Published training commands of three programs: each is accepted, or refused for one known flag.

The commands are facts: program, number of processes, DeepSpeed's JSON, flags and values. Files have
other names; "refused" is the first flag of the first message.
"""

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan

LINES = Path(__file__).with_name("recorded_commands.jsonl").read_text("utf-8").splitlines()
COMMANDS = [json.loads(line) for line in LINES]

OBJECTIVES = {
    "pretrain_gpt.py": "gpt",
    "pretrain_gpt2.py": "gpt",  # the older name
    "pretrain_prefix_lm.py": "prefix-lm",
    "finetune_t0.py": "multitask",
    "finetune_t0_non_causal_decoder.py": "multitask",
    "pretrain_bert.py": "bert",
    "pretrain_t5.py": "t5",
}


@pytest.fixture
def folder(tmp_path, monkeypatch, modules):
    """The working directory, on a machine with the package of 8-bit optimizers."""
    monkeypatch.chdir(tmp_path)
    modules("bitsandbytes.optim", AdamW8bit=None)
    return tmp_path


def words_of(command, folder):
    """Return the words of `command`, once the files that its flags are read from exist."""
    words = [word for each in shlex.split(command["flags"]) for word in each.split("=", 1)]
    for flag, value in zip(words, words[1:], strict=False):
        if flag.endswith("weighted-split-paths-path"):
            role = flag.removeprefix("--").partition("-")[0]
            (folder / value).write_text(f'"{role}: 0.7 0:0.95 A, 0.3 0:0.95 B"\n')
        if flag == "--deepspeed_config":
            (folder / value).write_text(json.dumps(command.get("json", {})))
    return words


def problems(command, folder):
    """Return why the command cannot be planned; none if it can."""
    objective = OBJECTIVES[command["program"]]
    try:
        config, _ = parse_config(words_of(command, folder), objective=objective)
        plan(
            config,
            world_size=command["processes"],
            vocab_size=50257,
            device="cuda",
            objective=objective,
        )
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command["file"][-60:])
def test_a_recorded_command_is_accepted_or_refused_for_a_known_flag(command, folder):
    found = problems(command, folder)
    assert not any("unknown flag" in problem and "write" not in problem for problem in found)
    if "refused" not in command:
        assert found == ()
        return
    assert found
    flags = re.findall(r"--[\w-]+", found[0])
    assert command["refused"] in (flags[:1] or [found[0][:40]])


def test_most_commands_of_each_program_run_unchanged():
    accepted = Counter(command["of"] for command in COMMANDS if "refused" not in command)
    assert accepted == {"Megatron-LM": 89, "BigScience": 28, "deepspeedai": 17}
