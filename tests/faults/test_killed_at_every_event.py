"""A job that is killed at any event of its files goes on as if nothing had happened, bit for bit."""

import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from forked import FLUSH, Killed, steps, without_head_start, without_numbers
from small_job import LAST, Job, is_same

from megatron.checkpointing.manifest import (
    LATEST,
    REPLACED,
    STAGING,
    damage,
    iteration_of,
    published_tags,
    read_manifest,
)

SIGKILL = -9
LASTING = re.compile(rf"global_step\d+|journal\.jsonl|{LATEST}|failure.*\.json|zero_to_\w+\.py")
READ = "read "
READS_WEIGHTS = re.compile(rf"{READ}global_step\d+/mp_rank_\d+_model_states\.pt")
WRITTEN = f"{FLUSH} {STAGING}"


def deaths(events: Sequence[str], draw: random.Random, *, rank: int = 0) -> Iterator[Killed]:
    """Yield a death at each kind of event that changes what is on disk, and at half a file of it.

    What reads or flushes changes nothing that a killed process leaves behind, so a death at the
    next change stands for it; one of the reads and one of the flushes come all the same.
    """
    kinds: dict[str, list[int]] = {}
    for number, event in enumerate(events):
        kinds.setdefault(without_numbers(event), []).append(number)
    for harmless in (READ, FLUSH):
        those = [kind for kind in kinds if kind.startswith(harmless)]
        yield Killed(draw.choice(kinds[draw.choice(those)]), rank)
    for kind, numbers in kinds.items():
        if not kind.startswith((READ, FLUSH)):
            yield Killed(draw.choice(numbers), rank)
        if kind.startswith(WRITTEN) and kind.endswith((".pt", ".json")):
            yield Killed(draw.choice(numbers), rank, torn=True)


def newest_iteration(save: Path) -> int:
    """Return the iteration that a run in `save` has to go on from: the newest that is whole."""
    for tag in published_tags(save):
        if not damage(save / tag, read_manifest(save / tag).files):
            return iteration_of(tag) or 0
    return 0


def wrong_after(job: Job, calm: Path, save: Path, killed: Killed, *more: str) -> str:
    """Kill the job in `save` and let it go on; return what differs from `calm` then, or nothing."""
    died = job.run(save, *more, killed=killed, setup=without_head_start)
    if died.codes[killed.rank] != SIGKILL:
        return "was not killed:\n" + died.outputs[killed.rank]
    stood_at = newest_iteration(save)
    ended = job.run(save, *more)
    if set(ended.codes) != {0}:
        return "does not go on:\n" + "\n".join(ended.outputs)
    if stood_at and f"at iteration {stood_at}\n" not in ended.outputs[0]:
        return f"did not go on from iteration {stood_at}:\n{ended.outputs[0]}"
    if not is_same(save, calm):
        return f"took other steps: {steps(save)}"
    if left := {path.name for path in save.iterdir() if not LASTING.fullmatch(path.name)}:
        return f"leaves {left}"
    return "" if (save / LATEST).read_text() == f"global_step{LAST}" else "latest is another"


def require_none(problems: dict[str, str]) -> None:
    wrong = [f"{event}: {problem}" for event, problem in problems.items() if problem]
    assert not wrong, "\n".join(wrong)


def test_a_run_killed_at_any_event_of_its_files_loses_nothing(job: Job, tmp_path: Path) -> None:
    (events,) = job.events
    deadly = list(deaths(events, random.Random(7)))
    assert {events[death.event].split()[0] for death in deadly} == {
        *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "read", "write", FLUSH)
    }
    assert sum(death.torn for death in deadly) >= 3
    require_none(
        {
            f"{events[death.event]} {death}": wrong_after(
                job, job.save, tmp_path / str(number), death
            )
            for number, death in enumerate(deadly)
        }
    )


def test_a_run_killed_while_it_saves_in_the_background_loses_nothing(
    job: Job, tmp_path: Path
) -> None:
    behind = ["--async-save"]
    calm = tmp_path / "calm"
    (events,) = job.run(calm, *behind).succeeded().events
    assert is_same(calm, job.save)
    first = next(i for i, event in enumerate(events) if STAGING in event)
    draw = random.Random(7)
    deadly = [death for death in deaths(events, draw) if death.event >= first]
    torn = [death for death in deadly if death.torn]
    deadly = [*draw.sample(torn, 2), *draw.sample([d for d in deadly if not d.torn], 4)]
    problems = {}
    for number, death in enumerate(deadly):
        event = events[death.event]
        same_before = events[: death.event].count(event)
        death = replace(death, only=event, event=same_before)
        problems[str(death)] = wrong_after(job, calm, tmp_path / str(number), death, *behind)
    require_none(problems)


def test_a_run_killed_while_it_loads_reshapes_or_replaces_loses_nothing(
    job: Job, keeping_job: Job, tmp_path: Path
) -> None:
    # The newest checkpoint is damaged: the run goes on from the one before, in another layout,
    # and saves those of the same iterations once more, in the place of the damaged one.
    start, reshaped = tmp_path / "start", ["--zero-stage", "1"]
    shutil.copytree(keeping_job.save, start)
    shutil.rmtree(start / f"global_step{LAST}")
    (start / "global_step4" / "rng_rank_00000.pt").write_bytes(b"")
    calm = Path(shutil.copytree(start, tmp_path / "calm"))
    (events,) = keeping_job.run(calm, *reshaped).succeeded().events
    known = set(map(without_numbers, job.events[0]))
    loaded = next(i for i, event in enumerate(events) if event.startswith(f"os.mkdir {STAGING}"))
    reads = [i for i in range(loaded) if READS_WEIGHTS.fullmatch(events[i])]
    draw = random.Random(7)
    deadly = [
        death
        for death in deaths(events, draw)
        if death.event < loaded or without_numbers(events[death.event]) not in known
    ]
    replaces = [d for d in deadly if REPLACED in events[d.event]]
    others = [d for d in deadly if d not in replaces]
    assert any(events[d.event].startswith("os.rename global_step") for d in replaces)
    deadly = [Killed(draw.choice(reads)), *replaces, *draw.sample(others, 2)]
    problems = {}
    for number, death in enumerate(deadly):
        save = Path(shutil.copytree(start, tmp_path / str(number)))
        name = f"{events[death.event]} {death}"
        problems[name] = wrong_after(keeping_job, calm, save, death, *reshaped)
    require_none(problems)


def test_a_job_of_two_ranks_loses_nothing_when_either_is_killed(
    job_of_two: Job, tmp_path: Path
) -> None:
    draw = random.Random(7)
    problems = {}
    for rank, events in enumerate(job_of_two.events):
        # Before the first save there is nothing to lose.
        first = next(i for i, event in enumerate(events) if STAGING in event)
        dangerous = [d for d in deaths(events, draw, rank=rank) if d.event >= first]
        for death in draw.sample(dangerous, 2):
            name = f"{events[death.event]} {death}"
            save = tmp_path / f"{rank}-{death.event}-{death.torn}"
            problems[name] = wrong_after(job_of_two, job_of_two.save, save, death)
    assert len(problems) == 4
    require_none(problems)
