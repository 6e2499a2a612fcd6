"""Every JSON of ds_configs/ beside the flags that its table gives, and the tool that prints one."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from problems import problem
from tiny import tiny_argv, tiny_plan

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "ds_configs"
ROWS = dict(
    re.findall(r"^\| `(\w+\.json)` \|.*\| `([^`]*)` \|$", (FOLDER / "README.md").read_text(), re.M)
)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(
        "make_ds_config", REPOSITORY / "tools" / "make_ds_config.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_has_every_file():
    assert set(ROWS) == {file.name for file in FOLDER.glob("*.json")}


@pytest.mark.parametrize("name", ROWS)
def test_a_file_goes_with_the_flags_of_its_row(name):
    user = json.loads((FOLDER / name).read_text())
    decided = tiny_plan(
        *("--deepspeed_config", str(FOLDER / name), *ROWS[name].split()),
        world_size=2,
        device="cuda",
    )
    zero = decided.deepspeed["zero_optimization"]
    assert user.get("zero_optimization", {}).items() <= zero.items()
    assert decided.deepspeed["train_micro_batch_size_per_gpu"] == 2
    for key in ("flops_profiler", "aio"):
        assert decided.deepspeed.get(key) == user.get(key)
    assert bool(decided.curriculum.schedule) == ("curriculum_learning" in user)


def test_flags_that_contradict_a_file_are_refused():
    with problem("zero_optimization.stage is 1 … --zero-stage"):
        file = str(FOLDER / "zero1_bf16.json")
        tiny_plan("--bf16", "--zero-stage", "2", "--deepspeed_config", file, device="cuda")


@pytest.mark.parametrize("spelling", ["--world-size", "--num-gpus"])
def test_the_tool_prints_what_deepspeed_gets(tool, capsys, spelling):
    flags = ("--bf16", "--global-batch-size", "16", "--clip-grad", "0.5", "--zero-stage", "1")
    tool.main([*tiny_argv(*flags, without=("--lr", "--data-path")), spelling, "4"])
    found = json.loads(capsys.readouterr().out)
    assert found == tiny_plan(*flags, world_size=4, device="cuda").deepspeed
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (16, 2)
    assert found["gradient_clipping"] == 0.5
