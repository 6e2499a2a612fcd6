"""The processes of one launch find each other, and wait for each other, through files.

What earlier launches left in the directory counts for nothing, whatever a launcher calls its runs.
"""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from megatron.common.atomic_files import replace_text
from megatron.common.errors import DataError
from megatron.data.preprocessing.shard_writer import STATE, part_directory
from megatron.data.token_files.publish import write_errors_name

log = logging.getLogger(__name__)

_POLL_S = 0.2
_SAY_EVERY_S = 60.0


def meet(root: Path, rank: int, num_ranks: int, timeout_s: float) -> str:
    """Return a name for this launch, the same in all its processes, that no other launch has.

    Rank 0 makes it up. Another rank answers with it and a word of its own, and knows that it was
    no older launch when rank 0 repeats that word.

    Communication: waits for every other rank, through files.

    Raises:
        DataError: one does not come for `timeout_s`, or another launch meets in this directory.
    """
    word = secrets.token_hex(8)
    with write_errors_name(root):
        root.mkdir(exist_ok=True)
    if rank == 0:
        return _invite(root, word, num_ranks, timeout_s)
    return _join(root, word, rank, timeout_s)


def say_done(root: Path, rank: int, launch: str) -> None:
    """Tell rank 0 of this launch that the shard of `rank` is finished."""
    _write(root / f"rank-{rank}.done", launch)


def wait_for_shards(root: Path, num_shards: int, launch: str, timeout_s: float) -> None:
    """Return when all shards of this launch are finished.

    Communication: waits for every other rank, through files.

    Raises:
        DataError: nothing has happened on the missing shards for `timeout_s`.
    """

    def waits_for() -> str:
        missing = [i for i in range(num_shards) if _read(root / f"rank-{i}.done") != launch]
        return f"shards {_list(missing)} of {num_shards} are not finished" if missing else ""

    def signs() -> list[float]:
        return [_changed_at(part_directory(root, i, num_shards) / STATE) for i in range(num_shards)]

    _wait(waits_for, timeout_s, signs)


def _invite(root: Path, launch: str, num_ranks: int, timeout_s: float) -> str:
    missing = set(range(1, num_ranks))
    _write(root / "launch", launch)

    def waits_for() -> str:
        for rank in sorted(missing):
            answer = _read(root / f"rank-{rank}.here")
            if answer.startswith(f"{launch} "):
                _write(root / f"rank-{rank}.met", answer)
                missing.remove(rank)
        if _read(root / "launch") not in ("", launch):
            raise DataError(
                f"another launch works in {root}; wait for its end, or give another --output-prefix"
            )
        return f"ranks {_list(sorted(missing))} of {num_ranks} have not come" if missing else ""

    _wait(waits_for, timeout_s)
    return launch


def _join(root: Path, word: str, rank: int, timeout_s: float) -> str:
    answered = ""

    def waits_for() -> str:
        nonlocal answered
        launch = _read(root / "launch")
        if launch != answered:
            _write(root / f"rank-{rank}.here", f"{launch} {word}")
            answered = launch
        is_met = launch and _read(root / f"rank-{rank}.met") == f"{launch} {word}"
        return "" if is_met else "rank 0 has not come"

    _wait(waits_for, timeout_s)
    return answered


def _wait(
    waits_for: Callable[[], str], timeout_s: float, signs: Callable[[], object] = lambda: None
) -> None:
    """Return when `waits_for()` says nothing.

    Raises:
        DataError: for `timeout_s` neither that has changed nor what `signs()` returns.
    """
    said_at = seen_at = time.monotonic()
    seen: object = None
    while waiting := waits_for():
        now = (waiting, signs())
        if now != seen:
            seen, seen_at = now, time.monotonic()
        if time.monotonic() - seen_at > timeout_s:
            raise DataError(
                f"{waiting}, and nothing has happened there for {timeout_s} s (--timeout-s); look "
                "at the messages of their ranks, and run again with --resume"
            )
        if time.monotonic() - said_at > _SAY_EVERY_S:
            said_at = time.monotonic()
            log.info("waiting: %s", waiting)
        time.sleep(_POLL_S)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _write(path: Path, text: str) -> None:
    with write_errors_name(path):
        replace_text(path, text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
