"""A run that injects faults into itself ends at the same bits as the calm one."""

import json
from pathlib import Path

import pytest
from forked import without_head_start
from problems import problem
from small_job import Job, calm_job, is_same
from tiny import tiny_config, tiny_plan

from megatron.extensions.chaos.flags import FAULTS, ChaosPlan, plan_chaos
from megatron.extensions.chaos.hook import strikes

MOST_STARTS = 30
CHAOS = "seed=190,kill=0.2,kill_save=0.15,full_disk=0.2,flip=0.6,truncate=0.3,slow_disk=0.2,slow_disk_s=0.1"
CHAOS_OF_TWO = "seed=61,kill=0.1,kill_save=0.1,full_disk=0.1,flip=0.6,truncate=0.3"


def faults(save: Path) -> list[dict]:
    records = map(json.loads, (save / "journal.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "chaos"]


def survive(job: Job, save: Path, *more: str, chaos: str = CHAOS) -> list[str]:
    """Start `job` again and again until it is done; return the output of rank 0 of each start."""
    output = []
    for _ in range(MOST_STARTS):
        ended = job.run(save, "--chaos", chaos, *more, setup=without_head_start)
        output.append(ended.outputs[0])
        if set(ended.codes) == {0}:
            return output
    raise AssertionError(f"not done after {MOST_STARTS} starts:\n{output[-1]}")


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["at once", "in the background"])
def test_a_run_under_chaos_comes_to_the_same_bits(
    keeping_job: Job, tmp_path: Path, more: list[str]
) -> None:
    save = tmp_path / "chaos"
    output = survive(keeping_job, save, *more)
    struck = [record["fault"] for record in faults(save)]
    assert "THIS RUN KILLS, STALLS AND DAMAGES ITSELF" in output[0]
    assert len(output) > 1
    # In the background, the clock decides what is published before a fault strikes.
    if not more:
        assert {"kill", "kill_save", "full_disk", "flip"} <= set(struck), struck
        assert len(output) == 4
        assert any("No space left on device (--chaos)" in text for text in output)
        assert any("is skipped: " in text for text in output)
    assert is_same(save, keeping_job.save)


@pytest.fixture(scope="module")
def job_of_stages(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two stages with a zero-bubble schedule."""
    flags = ["--num-layers", "2", "--pipeline-model-parallel-size", "2", "--enable-zbh1-pipeline"]
    return calm_job(tmp_path_factory.mktemp("stages"), *flags, ranks=2)


@pytest.mark.parametrize("name", ["job_of_two", "job_of_stages"])
def test_two_ranks_under_chaos_come_to_the_same_bits(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    """A killed rank ends the other one too."""
    job, save = request.getfixturevalue(name), tmp_path / "chaos"
    output = survive(job, save, "--keep-last", "3", chaos=CHAOS_OF_TWO)
    struck = {(record["fault"], record["where"]) for record in faults(save)}
    expected = {("kill", "rank 0"), ("full_disk", "rank 1"), ("kill_save", "rank 1")}
    assert expected <= struck, struck
    assert any("is skipped: " in text for text in output)
    assert is_same(save, job.save)


def test_what_strikes_is_decided_by_its_words_alone() -> None:
    plan = ChaosPlan(seed=7, kill=0.1, stall=0.1)

    def struck(plan: ChaosPlan, fault: str, attempt: int, rank: int) -> list[int]:
        words = {"attempt": attempt, "rank": rank}
        return [i for i in range(1000) if strikes(plan, fault, iteration=i, **words)]

    kills = struck(plan, "kill", 1, 0)
    assert 60 < len(kills) < 140
    assert kills == struck(plan, "kill", 1, 0)
    others = [
        struck(plan, "stall", 1, 0),
        struck(plan, "kill", 2, 0),
        struck(plan, "kill", 1, 1),
        struck(ChaosPlan(seed=8, kill=0.1), "kill", 1, 0),
    ]
    assert all(kills != other for other in others)
    assert struck(ChaosPlan(seed=7, kill=1.0), "kill", 1, 0) == list(range(1000))
    assert struck(ChaosPlan(seed=7), "kill", 1, 0) == []


SAVING = ["--save", "runs", "--load", "runs", "--save-interval", "2"]


def test_fault_options_become_chances() -> None:
    plan = plan_chaos(tiny_config(*SAVING, "--chaos", "seed=7,kill=0.5,stall_s=3"))
    assert plan == ChaosPlan(seed=7, kill=0.5, stall_s=3)
    assert plan.is_on
    assert not plan_chaos(tiny_config()).is_on
    assert all(ChaosPlan(**{fault: 0.1}).is_on for fault in FAULTS)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*SAVING, "--chaos", "seed=1,kil=0.5"], "kil … seed, kill, "),
        ([*SAVING, "--chaos", "seed=1,kill=2"], "kill … from 0 to 1 … 2"),
        ([*SAVING, "--chaos", "seed=1,kill=-1"], "kill … from 0 … '-1'"),
        ([*SAVING, "--chaos", "seed=1,kill"], "kill … from 0 … ''"),
        ([*SAVING, "--chaos", "kill=0.5"], "add seed=NUMBER"),
        ([*SAVING, "--chaos", "seed=1.5,kill=0.5"], "seed … integer … 1.5"),
        ([*SAVING, "--chaos", "seed=1"], "--chaos seed=1 … no fault"),
        (["--chaos", "seed=1,kill=0.5"], "--chaos … --save … --load"),
        ([*SAVING, "--chaos", "seed=1,flip=0.5", "--keep-last", "1"], "older … --keep-last 2"),
        (
            [*SAVING, "--chaos", "seed=1,truncate=0.5", "--keep-every", "4"],
            "--keep-last 2",
        ),
        ([*SAVING, "--chaos", "seed=1,kill=0.5", "--eval-only"], "--chaos … training"),
    ],
)
def test_faults_that_cannot_be_injected_are_refused(flags: list[str], words: str) -> None:
    with problem(words):
        tiny_plan(*flags)
    assert "chaos" not in tiny_config().extensions


def test_the_faults_of_a_run_on_a_gpu_are_one_kill():
    plan = ChaosPlan(seed=239, kill=0.15)  # tests/gpu/test_gpu_runs.py
    first, second = (
        [i for i in range(1, 13) if strikes(plan, "kill", attempt=attempt, iteration=i)]
        for attempt in (1, 2)
    )
    assert first[:1] == [11] and not second
