"""Faults in bulk: small jobs that are struck at random, go on, and must come to the calm run's bits.

Each kind of fault draws its trials from a seed. A trial ends in one word: see `WORDS`. The figures
of docs/reliability.md are counts of these words.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from forked import Strike, hashes, without_head_start
from small_job import LAST, Job, is_same

SURVIVED, REFUSED, TRACEBACK, LOST, HUNG = "survived", "refused", "traceback", "lost", "hung"
MISSED = "missed"
WORDS = {
    SURVIVED: "came to the bits of the calm run",
    REFUSED: "ended with a sentence twice in a row, until somebody mends what it names",
    TRACEBACK: "ended with a traceback",
    LOST: "came to other bits, or could not be continued",
    HUNG: "had to be killed",
    MISSED: "came to the bits of the calm run, and no fault had struck it",
}

MOST_STARTS = 4
TIMEOUT_S = 300.0
GRACE_S = 10.0
"""How long the ranks that stay may take to find out by themselves, before they are killed."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Args:
        word: one of `WORDS`.
        details: actions, and the output of the last start.
    """

    word: str
    details: str


def missed(outcome: Outcome) -> Outcome:
    """Return the outcome of a trial in which no fault struck."""
    return replace(outcome, word=MISSED) if outcome.word == SURVIVED else outcome


Trial = Callable[[Path], Outcome]
"""Strikes a job that saves to this folder, which does not exist yet."""


def goes_on(job: Job, save: Path, what: str, *more: str, has_records: bool = True) -> Outcome:
    """Start `job` without a fault, and again if that ends with a sentence; return what came of it.

    Args:
        has_records: whether the journal must tell of all steps, too.
    """
    for _ in range(2):
        try:
            ended = job.run(save, *more, timeout_s=TIMEOUT_S)
        except TimeoutError as error:
            return Outcome(HUNG, f"{what}, then:\n{error}")
        output = "\n".join(ended.outputs)
        if "Traceback" in output:
            return Outcome(TRACEBACK, f"{what}, then:\n{output}")
        if set(ended.codes) == {0}:
            is_right = is_same if has_records else has_same_weights
            word = SURVIVED if is_right(save, job.save) else LOST
            return Outcome(word, f"{what}, then:\n{output}")
    is_sentence = set(ended.codes) <= {1, 2} and "error: " in output
    return Outcome(REFUSED if is_sentence else LOST, f"{what}, then:\n{output}")


def has_same_weights(save: Path, calm: Path) -> bool:
    """Whether two runs came to the same state, bit for bit."""
    return hashes(save, LAST) == hashes(calm, LAST)


def struck(
    job: Job, what: str, strikes: list[list[Strike]], save: Path, *more: str, setup: object = None
) -> Outcome:
    """Start `job` once for each list of strikes, and then calmly."""
    is_struck = False
    for those in strikes:
        try:
            ended = job.run(
                save,
                *more,
                strikes=those,
                timeout_s=TIMEOUT_S,
                grace_s=GRACE_S,
                setup=setup or without_head_start,
            )
        except TimeoutError as error:
            return Outcome(HUNG, f"{what}:\n{error}")
        output = "\n".join(ended.outputs)
        is_struck = (
            is_struck or set(ended.codes) != {0} or any(s.number == signal.SIGSTOP for s in those)
        )
        # A rank whose connection is lost may tell where it was.
        if "Traceback" in output and not any(code and code < 0 for code in ended.codes):
            return Outcome(TRACEBACK, f"{what}:\n{output}")
    outcome = goes_on(job, save, what, *more)
    return outcome if is_struck else missed(outcome)


def life_of(job: Job, save: Path) -> float:
    """Return how many seconds a calm start of `job` takes here."""
    began = time.monotonic()
    job.run(save).succeeded()
    return time.monotonic() - began


def deaths(job: Job, count: int, draw: random.Random, folder: Path) -> Iterator[Trial]:
    """Yield kills of a random rank at any time: before the first step, in steps, in saves."""
    life_s = life_of(job, folder / "life")
    for _ in range(count):
        starts = [
            [Strike(draw.uniform(0, life_s), draw.randrange(job.ranks), signal.SIGKILL)]
            for _ in range(draw.randint(1, MOST_STARTS - 1))
        ]
        more = ["--async-save"] if draw.random() < 0.5 else []
        yield partial(_struck, job, f"kill {starts}", starts, more)


def requests(job: Job, count: int, draw: random.Random, folder: Path) -> Iterator[Trial]:
    """Yield SIGTERM and SIGUSR1, alone and in storms, at any time."""
    life_s = life_of(job, folder / "life")
    for _ in range(count):
        starts = []
        for _ in range(draw.randint(1, MOST_STARTS - 1)):
            at, rank = draw.uniform(0, life_s), draw.randrange(job.ranks)
            number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
            storm = draw.choice([1, 1, 50])
            starts.append([Strike(at + i * 0.01, rank, number) for i in range(storm)])
        details = f"signals {[(s[0], len(s)) for s in starts]}"
        yield partial(_struck, job, details, starts, [])


def pauses(job: Job, count: int, draw: random.Random, folder: Path) -> Iterator[Trial]:
    """Yield ranks that stand still for a moment at any time, and go on."""
    life_s = life_of(job, folder / "life")
    for _ in range(count):
        at, rank = draw.uniform(0, life_s), draw.randrange(job.ranks)
        stop = [Strike(at, rank, signal.SIGSTOP), Strike(at + 1.5, rank, signal.SIGCONT)]
        yield partial(_struck, job, f"pause {stop}", [stop], [])


def _struck(
    job: Job, what: str, starts: list[list[Strike]], more: list[str], save: Path
) -> Outcome:
    return struck(job, what, starts, save, *more)


def flip(file: Path, draw: random.Random) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes() or b"\0")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(file: Path, draw: random.Random) -> None:
    """Lose the end."""
    os.truncate(file, draw.randrange(max(1, file.stat().st_size)))


def empty(file: Path, draw: random.Random) -> None:
    """Lose all of it."""
    os.truncate(file, 0)


def zero(file: Path, draw: random.Random) -> None:
    """Have zeros from some place on, as after a power failure."""
    content = file.read_bytes()
    place = draw.randrange(max(1, len(content)))
    file.write_bytes(content[:place] + bytes(len(content) - place))


def grow(file: Path, draw: random.Random) -> None:
    """Have more behind its end."""
    with file.open("ab") as stream:
        stream.write(draw.randbytes(draw.choice([1, 100])))


def remove(file: Path, draw: random.Random) -> None:
    """Remove it."""
    file.unlink()


def become_folder(file: Path, draw: random.Random) -> None:
    """Have a folder in its place."""
    file.unlink()
    file.mkdir()


def become_fifo(file: Path, draw: random.Random) -> None:
    """Have a FIFO in its place."""
    file.unlink()
    os.mkfifo(file)


def become_link(file: Path, draw: random.Random) -> None:
    """Have a link to nothing in its place."""
    file.unlink()
    file.symlink_to("nowhere")


HARMS = (flip, cut, empty, zero, grow, remove, become_folder, become_fifo, become_link)


def damages(job: Job, count: int, draw: random.Random, folder: Path) -> Iterator[Trial]:
    """Yield damage to any file of a stopped run or of what it reads, with its caches warm.

    These are checkpoints, latest, the journal, index maps and token files. All kinds of damage
    come to all kinds of files in turn.
    """
    pairs = [(kind, harm) for harm in HARMS for kind in KINDS]
    draw.shuffle(pairs)
    files = _stopped(job, folder)
    for number in range(count):
        kind, harm = pairs[number % len(pairs)]
        yield partial(_damaged, job, files, kind, harm, random.Random(draw.random()))


KINDS = {
    "newest checkpoint": "run/global_step4/*",
    "older checkpoint": "run/global_step2/*",
    "manifest": "run/global_step4/manifest.json",
    "latest": "run/latest",
    "journal": "run/journal.jsonl",
    "index cache": "cache/*",
    "token index": "corpus.idx",
    "tokens": "corpus.bin",
    "digests of tokens": "corpus.bin.xxh3",
}


def _damaged(
    job: Job,
    files: Path,
    kind: str,
    harm: Callable[[Path, random.Random], None],
    draw: random.Random,
    save: Path,
) -> Outcome:
    """Harm one file behind a stopped run whose caches are warm, and go on."""
    # At the path where the caches were made, so that they stay warm.
    own = files.with_name("harmed")
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(files, own)
    file = draw.choice(sorted(file for file in own.glob(KINDS[kind]) if file.is_file()))
    harm(file, draw)
    what = f"{harm.__name__} of {file.relative_to(own)}"
    # What a flipped digit of a loss was, nothing tells.
    return goes_on(job, own / "run", what, *_flags(own), has_records=kind != "journal")


def _stopped(job: Job, folder: Path) -> Path:
    """Return a folder with a stopped run and all that it reads, after a start with warm caches."""
    own = folder / "harmed"
    shutil.copytree(job.save.parent, own, ignore=shutil.ignore_patterns(job.save.name, ".*"))
    for _ in range(2):
        job.run(own / "run", *_flags(own), "--exit-interval", "2").succeeded()
    return Path(shutil.copytree(own, folder / "whole"))


def _flags(own: Path) -> list[str]:
    return ["--data-path", str(own / "corpus"), "--data-cache-path", str(own / "cache")]


SWEEPS: dict[str, Callable[[Job, int, random.Random, Path], Iterator[Trial]]] = {
    "kill": deaths,
    "signals": requests,
    "pause": pauses,
    "damage": damages,
}
"""What needs no preloaded library, by name; see preloaded.py for the rest."""


def sweep(
    job: Job, trials: Iterator[Trial], folder: Path, *, most_bad: int = 20
) -> Iterator[Outcome]:
    """Yield the outcome of each trial; remove what it left, unless something was wrong."""
    bad = 0
    for number, trial in enumerate(trials):
        place = folder / str(number)
        place.mkdir(parents=True)
        outcome = trial(place / "run")
        print(f"{number}: {outcome.word}: {outcome.details.splitlines()[0]}", file=sys.stderr)
        yield outcome
        if outcome.word in (SURVIVED, REFUSED, MISSED):
            shutil.rmtree(place)
        else:
            bad += 1
        if bad >= most_bad:
            return
