"""Sweeps whose processes have a library preloaded that injects faults: a program of its own.

    python preloaded.py SEED FOLDER KIND=COUNT...

prints a kind and an outcome a line as JSON. The library that LD_PRELOAD names is in this process and in all
forks of its server, and variables turn it on in one rank of one start.
"""

import errno
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from forked import without_head_start
from small_job import Job, calm_job
from sweep import HUNG, TIMEOUT_S, TRACEBACK, Outcome, Trial, goes_on, missed, sweep

MARK = "a call failed on purpose"
"""What faulty_io.c says when it strikes."""

PARTS = {
    "write": ["staging-global_step", "journal.jsonl", "latest", "lock.json", "/cache/"],
    "fsync": ["staging-global_step", "/run"],
    "rename": ["/global_step", "latest", "/cache/"],
    "open": ["staging-global_step", "journal.jsonl", "global_step2/", "corpus.", "/cache/"],
    "read": ["global_step2/", "journal.jsonl", "latest", "corpus.idx", "/cache/"],
}
"""Parts of paths at which each call fails."""

JUMPS = ("+3600s", "-3600s", "+400d", "-400d", "+0")


def fail_calls(variables: dict[str, str], struck: int, rank: int) -> None:
    """Have calls of one rank fail."""
    without_head_start(rank)
    if rank == struck:
        os.environ.update(variables)


def errors(number: int, job: Job, count: int, draw: random.Random) -> Iterator[Trial]:
    """Yield starts in which calls on a part of the files fail: once, a few times or from then on."""
    for _ in range(count):
        call = draw.choice(list(PARTS))
        variables = {
            "FAULT_CALL": call,
            "FAULT_PATH": draw.choice(PARTS[call]),
            "FAULT_AT": str(draw.choice([0, 0, 1, 2, 5, 10])),
            "FAULT_TIMES": str(draw.choice([1, 3, 1_000_000])),
            "FAULT_ERRNO": str(number),
        }
        yield partial(_failing, job, variables)


def _failing(job: Job, variables: dict[str, str], save: Path) -> Outcome:
    """Have the first start, or one that goes on from iteration 2, meet the error."""
    what = " ".join(f"{name}={value}" for name, value in variables.items())
    own = ["--data-cache-path", str(save.parent / "cache")]
    if variables["FAULT_CALL"] == "read" or "global_step2" in variables["FAULT_PATH"]:
        job.run(save, *own, "--exit-interval", "2").succeeded()
    try:
        ended = job.run(save, *own, setup=partial(fail_calls, variables, 0), timeout_s=TIMEOUT_S)
    except TimeoutError as error:
        return Outcome(HUNG, f"{what}:\n{error}")
    output = "\n".join(ended.outputs)
    if "Traceback" in output:
        return Outcome(TRACEBACK, f"{what}:\n{output}")
    outcome = goes_on(job, save, what, *own)
    return outcome if MARK in output else missed(outcome)


def jumps(job: Job, count: int, draw: random.Random) -> Iterator[Trial]:
    """Yield starts in which the clock of the system jumps at some steps, to and fro."""
    for _ in range(count):
        yield partial(_jumping, job, [draw.choice(JUMPS) for _ in range(6)])


def jump_in_steps(file: str, offsets: list[str], rank: int) -> None:
    """Set the clock at each step; libfaketime reads `file` at each look at the clock."""
    from megatron.training.loop import loop

    without_head_start(rank)
    take_step = loop.take_step

    def step(engine: object, batches: object, schedule: object, state: object) -> object:
        Path(file).write_text(offsets[state.iteration % len(offsets)])  # type: ignore[attr-defined]
        return take_step(engine, batches, schedule, state)  # type: ignore[arg-type]

    loop.take_step = step  # type: ignore[assignment]


def _jumping(job: Job, offsets: list[str], save: Path) -> Outcome:
    clock = os.environ["FAKETIME_TIMESTAMP_FILE"]
    more = ["--hang-timeout", "100"]
    try:
        for stop in ("3", "100"):
            job.run(
                save,
                *more,
                "--exit-interval",
                stop,
                setup=partial(jump_in_steps, clock, offsets),
                timeout_s=TIMEOUT_S,
            )
    except TimeoutError as error:
        return Outcome(HUNG, f"clock {offsets}:\n{error}")
    finally:
        Path(clock).write_text("+0")
    return goes_on(job, save, f"clock {offsets}")


KINDS = {
    "EIO": partial(errors, errno.EIO),
    "ENOSPC": partial(errors, errno.ENOSPC),
    "clock": jumps,
}


def main() -> None:
    """Run the sweeps that the command line names, of one job."""
    seed, folder, *kinds = sys.argv[1:]
    data = Path(folder) / "data"
    data.mkdir(parents=True)
    job = calm_job(data)
    for kind, _, count in (words.partition("=") for words in kinds):
        trials = KINDS[kind](job, int(count), random.Random(int(seed)))
        for outcome in sweep(job, trials, Path(folder) / "trials" / kind):
            print(json.dumps([kind, asdict(outcome)]), flush=True)


if __name__ == "__main__":
    main()
