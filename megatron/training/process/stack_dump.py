"""Stack dumps of the threads of all processes, when a run hangs."""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from megatron.common.atomic_files import replace_text

_PACKAGE = Path(__file__).resolve().parents[2]
_DUMP = re.compile(r"rank-(\d+)\.json")

REPORT = "groups.txt"
"""File next to the dumps with the ranks at each stack position, written by one of them."""

_PAUSE_S = 0.2
_LATER_S = 1.0
"""Time in which a rank that has all dumps writes the report."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The stacks of one process."""

    rank: int
    host: str
    pid: int
    stage: str
    place: str  # of the main thread
    threads: dict[str, list[str]]  # innermost call last


def take_stacks(*, rank: int, host: str, pid: int, stage: str) -> Stacks:
    """Return the Python stacks of this process's threads but the calling one.

    A thread inside compiled code is shown at the call that entered it.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = {i: frame for i, frame in sys._current_frames().items() if i != own}
    return Stacks(
        rank=rank,
        host=host,
        pid=pid,
        stage=stage,
        place=place_of(frames[main]) if main in frames else "no main thread",
        threads={
            f"{names.get(i, 'of compiled code')} ({i})": [
                line.rstrip() for line in traceback.format_stack(frame)
            ]
            for i, frame in frames.items()
        },
    )


def place_of(frame: FrameType) -> str:
    """Return one line for where a thread is: the call it waits in, and our line that led there."""
    frames = [frame for frame, _ in traceback.walk_stack(frame)]
    ours = next((f for f in frames if _is_ours(f)), frame)
    file = Path(ours.f_code.co_filename)
    shown = file.relative_to(_PACKAGE.parent) if file.is_relative_to(_PACKAGE.parent) else file
    place = f"{_function(frame, ours)} ({shown}:{ours.f_lineno})"
    if any(f.f_code.co_name == "_exec_backward_pass" for f in frames):
        return f"{place} of the backward pass"
    block = next((number for f in frames if (number := _block(f)) is not None), None)
    return place if block is None else f"{place} of block {block}"


def _function(innermost: FrameType, ours: FrameType) -> str:
    """Return the name of the innermost function: a library function that we called, or ours."""
    return innermost.f_code.co_name if innermost is not ours else ours.f_code.co_name


def _is_ours(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return file.is_relative_to(_PACKAGE.parent) and "site-packages" not in file.parts


def _block(frame: FrameType) -> int | None:
    """Return the number of the transformer layer whose `forward` this is, if it is one."""
    layer = frame.f_locals.get("self")
    is_block = type(layer).__name__ == "ParallelTransformerLayerPipe"
    return layer.number if is_block and layer is not None else None


def write_stacks(stacks: Stacks, folder: Path) -> None:
    """Write the stacks to `folder`/rank-N.json, by an atomic rename."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(stacks), indent=1) + "\n"
    replace_text(folder / f"rank-{stacks.rank}.json", text)


def read_places(folder: Path, known: Mapping[int, str] | None = None) -> dict[int, str]:
    """Return the stack position of each rank's main thread, from the dumps in `folder`.

    Args:
        known: places of ranks whose dumps are not read again.
    """
    places = dict(known or {})
    for name in os.listdir(folder):
        match = _DUMP.fullmatch(name)
        if match and int(match[1]) not in places:
            stacks = json.loads((folder / name).read_text(encoding="utf-8"))
            places[int(match[1])] = stacks["place"]
    return places


def groups_of_ranks(
    folder: Path, *, rank: int, world_size: int, patience_s: float, poll_s: float
) -> list[str]:
    """Return a line for the ranks at each stack position: one rank reads all dumps in `folder`.

    Every rank may be that one; where nothing can be written it is rank 0. The other ranks have its
    report; [] if that does not come.

    Args:
        patience_s: timeout for the dumps of other ranks.
        poll_s: interval at which another rank looks for the report.
    """
    try:
        reads = _claim_report(folder)
    except OSError:
        reads = rank == 0
    if reads:
        groups = group_lines(_wait_for_places(folder, world_size, patience_s), world_size)
        with suppress(OSError):
            replace_text(folder / REPORT, "".join(f"{line}\n" for line in groups))
        return groups
    give_up_at = time.monotonic() + patience_s + _LATER_S
    while not (groups := _read_report(folder)) and time.monotonic() < give_up_at:
        time.sleep(max(_PAUSE_S, poll_s))
    return groups


def _wait_for_places(folder: Path, world_size: int, patience_s: float) -> dict[int, str]:
    """Return every rank's stack position, once all have written theirs or time is up."""
    give_up_at = time.monotonic() + patience_s
    places: dict[int, str] = {}
    while len(places) < world_size and time.monotonic() < give_up_at:
        time.sleep(_PAUSE_S)
        with suppress(OSError):
            places = read_places(folder, places)
    return places


def _claim_report(folder: Path) -> bool:
    """Whether this process is the first that reports on the dumps in `folder`.

    Raises:
        OSError: nothing can be written there.
    """
    try:
        os.close(os.open(folder / REPORT, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    return True


def _read_report(folder: Path) -> list[str]:
    """Return the lines of the report; [] if it is not written yet."""
    with suppress(OSError):
        return (folder / REPORT).read_text(encoding="utf-8").splitlines()
    return []


def group_lines(places: Mapping[int, str], world_size: int) -> list[str]:
    """Return a line for the ranks at each stack position, the fewest first: likely the cause.

    Args:
        places: by rank; a rank without one has not answered.
    """
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for rank in range(world_size):
        ranks_at[places.get(rank, "")].append(rank)
    lines = []
    for place, ranks in sorted(ranks_at.items(), key=lambda item: len(item[1])):
        count = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} ({spans(ranks)})"
        missing = "gave no answer: stopped, gone, or inside compiled code that keeps Python's lock"
        lines.append(f"{count} in {place}" if place else f"{count} {missing}")
    return lines


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers with neighbours as spans: 0-2, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(_span(each) for each in found)


def _span(each: Sequence[int]) -> str:
    return str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}"
