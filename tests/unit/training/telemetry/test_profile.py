"""Traces of some iterations, and the file of flags."""

import json
from dataclasses import asdict

import pytest
import torch
from problems import problem
from tiny import tiny_config

from megatron.checkpointing.train_state import TrainState
from megatron.config.run.logging import ProfilePlan
from megatron.engine.deepspeed.timers import Timers
from megatron.training.process.flags_file import write_flags
from megatron.training.telemetry.profile import Profile


def run(folder, iterations, *, start=3, stop=5, begin=0):
    profile = Profile(
        ProfilePlan(directory=str(folder), start=start, stop=stop, ranks=(0,)), rank=0
    )
    state = TrainState(iteration=begin)
    for _ in range(iterations):
        profile.before_step(state)
        # As many products as the number of the iteration.
        for _ in range(state.iteration + 1):
            torch.ones(2, 2) @ torch.ones(2, 2)
        state.iteration += 1
        profile.after_step(state, None)
    profile.close(state)
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    ("iterations", "begin", "name", "products"),
    [
        (8, 0, "trace_rank0_iterations3-4.json", 3 + 4),
        # The run ends before, or goes on within.
        (3, 0, "trace_rank0_iterations3-3.json", 3),
        (4, 3, "trace_rank0_iterations4-4.json", 4),
    ],
)
def test_the_iterations_asked_for_are_recorded(tmp_path, iterations, begin, name, products):
    assert run(tmp_path / "new", iterations, begin=begin) == [name]
    trace = json.loads((tmp_path / "new" / name).read_text())
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == products


def test_a_run_elsewhere_records_nothing_and_says_so(tmp_path, messages):
    assert run(tmp_path / "new", 4, begin=10) == []
    assert "iterations 3 to 4" in messages[-1]


def test_a_run_that_recorded_complains_of_nothing(tmp_path, messages):
    run(tmp_path / "new", 8)
    assert not [text for text in messages if "took none" in text]


def test_all_flags_are_written_sorted_and_dotted(tmp_path):
    file = write_flags(str(tmp_path / "new"), asdict(tiny_config("--seed", "77")))
    lines = file.read_text().splitlines()
    assert "  seed ............................................ 77" in lines
    names = [line.split()[0] for line in lines]
    assert names == sorted(names, key=str.lower)
    assert len(names) == len(set(names)) > 80
    assert file.name.startswith("args_2")


def test_a_directory_of_flags_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").touch()
    with problem("--log-path"):
        write_flags(str(tmp_path / "file"), {})


@pytest.mark.parametrize(
    ("level", "names"), [(0, []), (1, ["optimizer"]), (2, ["forward-send", "optimizer"])]
)
def test_timers_measure_what_their_level_says(level, names):
    waited = []
    timers = Timers(level, synchronise=lambda: waited.append(1))
    for _ in range(2):
        for name in ("forward-send", "optimizer"):
            with timers.part(name):
                pass
    taken = timers.take()
    assert sorted(taken) == names
    assert all(seconds >= 0 for seconds in taken.values())
    # The device is waited for at both ends of each part that is measured, and never else.
    assert len(waited) == 2 * 2 * len(names)
    assert timers.take() == {}
