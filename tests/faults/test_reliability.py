"""Faults of many kinds at random: none loses anything, none hangs, none ends with a traceback.

A quick sample by default. RELIABILITY_TRIALS=N takes N trials of each kind, RELIABILITY_SEED draws
others, and RELIABILITY_FIGURES names a file that gets a line of figures a kind: docs/reliability.md.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_job import Job
from sweep import HUNG, LOST, MISSED, SWEEPS, TIMEOUT_S, TRACEBACK, Outcome, sweep

HERE = Path(__file__).parent
SAMPLE = {"kill": 2, "signals": 1, "pause": 1, "damage": 5, "EIO": 3, "ENOSPC": 2, "clock": 1}
FAILING_CALLS = ("EIO", "ENOSPC")
TRIALS = int(os.environ.get("RELIABILITY_TRIALS", "0"))
SEED = int(os.environ.get("RELIABILITY_SEED", "1"))
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


def count_of(kind: str) -> int:
    return TRIALS or SAMPLE[kind]


def require_nothing_lost(kind: str, outcomes: list[Outcome]) -> None:
    counts = Counter(outcome.word for outcome in outcomes)
    if file := os.environ.get("RELIABILITY_FIGURES"):
        with Path(file).open("a") as stream:
            attempts = len(outcomes) - counts[MISSED]
            stream.write(json.dumps({"kind": kind, "attempts": attempts, **counts}) + "\n")
    wrong = [outcome for outcome in outcomes if outcome.word in (LOST, HUNG, TRACEBACK)]
    assert not wrong, "\n\n".join(f"{outcome.word}: {outcome.details}" for outcome in wrong)
    assert len(outcomes) == count_of(kind)


@pytest.mark.parametrize("kind", SWEEPS)
def test_random_faults_lose_nothing(
    kind: str, job_of_two: Job, keeping_job: Job, tmp_path: Path
) -> None:
    job = keeping_job if kind == "damage" else job_of_two
    trials = SWEEPS[kind](job, count_of(kind), random.Random(SEED), tmp_path)
    require_nothing_lost(kind, list(sweep(job, trials, tmp_path / "trials")))


@pytest.fixture(scope="module")
def failing_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library that has calls on files fail."""
    library = tmp_path_factory.mktemp("library") / "faulty_io.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler is installed")
    source = str(HERE / "faulty_io.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


def preloaded(
    kinds: Sequence[str], library: str, folder: Path, **variables: str
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each kind; what is preloaded strikes the forks of one more server."""
    words = [sys.executable, HERE / "preloaded.py", SEED, folder]
    words += [f"{kind}={count_of(kind)}" for kind in kinds]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "LD_PRELOAD": library, **variables}
    folder.mkdir(parents=True, exist_ok=True)
    # Files, not pipes, which a process that is left over would keep open.
    with (folder / "outcomes").open("w+") as said, (folder / "log").open("w+") as log:
        done = subprocess.run(
            list(map(str, words)),
            env=environment,
            stdout=said,
            stderr=log,
            cwd=HERE,
            timeout=TRIALS * TIMEOUT_S or 600,
        )
        said.seek(0)
        log.seek(0)
        assert done.returncode == 0, log.read()
        lines = said.read().splitlines()
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    for kind, outcome in map(json.loads, lines):
        outcomes[kind].append(Outcome(**outcome))
    return outcomes


@pytest.fixture(scope="module")
def outcomes_of_failing_calls(
    failing_files: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    return preloaded(FAILING_CALLS, failing_files, tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize("kind", FAILING_CALLS)
def test_calls_on_files_that_fail_lose_nothing(
    kind: str, outcomes_of_failing_calls: dict[str, list[Outcome]]
) -> None:
    require_nothing_lost(kind, outcomes_of_failing_calls[kind])


def test_clocks_that_jump_lose_nothing(tmp_path: Path) -> None:
    if not Path(FAKETIME).exists():
        pytest.skip(f"libfaketime is not installed ({FAKETIME})")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    fakes = {
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        # Waiting is by the monotonic clock, which no administrator sets.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # It would hold a semaphore of all forks, and one that leaves hard meanwhile stops all others.
        "NO_FAKE_STAT": "1",
    }
    outcomes = preloaded(["clock"], FAKETIME, tmp_path / "run", **fakes)
    require_nothing_lost("clock", outcomes["clock"])
