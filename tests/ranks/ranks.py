"""Tests in several gloo processes on one machine; a file store, so that no two can collide."""

import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forks import become_own_process, server
from shared_groups import differing_requests, end_engines, shared_group

TIMEOUT_S = 600
PASSED = "passed"

Check = Callable[[int], None]
"""Called with the rank, on every rank."""


def run_on_ranks(
    world_size: int,
    body: Callable[..., None],
    folder: Path,
    *words: Any,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run body(rank, *words) in `world_size` processes; a failure or a hang of any rank fails."""
    store = folder / f"{body.__name__}.store"
    server()
    context = mp.start_processes(
        _enter,
        args=(world_size, body, words, store, timeout_s, dict(os.environ)),
        nprocs=world_size,
        join=False,
        start_method="forkserver",
    )
    give_up_at = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=1):
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{body.__name__} did not end within {timeout_s} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()


def outcomes_on_ranks(
    world_size: int, checks: Sequence[Check], folder: Path, *, timeout_s: float = TIMEOUT_S
) -> dict[str, str]:
    """Run the checks one after the other in the same processes: starting them is the slow part.

    Returns:
        For every check PASSED, or what went wrong on which rank. Behind one that failed on some
        rank the others may be out of step, so the rest has not run.
    """
    try:
        run_on_ranks(world_size, _check_all, folder, checks, folder, timeout_s=timeout_s)
        ended = ""
    except Exception as error:
        ended = str(error).strip().splitlines()[-1]
    output = [_read(folder / f"rank{rank}.jsonl") for rank in range(world_size)]
    return {check.__name__: _outcome(check.__name__, output, ended) for check in checks}


def require_passed(check: Check, outcomes: dict[str, str]) -> None:
    """Fail with what went wrong unless `check` passed on all ranks."""
    if outcomes[check.__name__] != PASSED:
        pytest.fail(outcomes[check.__name__], pytrace=False)


def _outcome(name: str, output: Sequence[dict[str, str]], ended: str) -> str:
    texts = [outcomes.get(name, f"did not finish: {ended}") for outcomes in output]
    wrong = [f"[rank {rank}] {text}" for rank, text in enumerate(texts) if text != PASSED]
    return "\n".join(wrong) or PASSED


def _read(file: Path) -> dict[str, str]:
    lines: Iterable[str] = file.read_text().splitlines() if file.exists() else ()
    return dict(json.loads(line) for line in lines)


def _enter(
    rank: int,
    world_size: int,
    body: Callable[..., None],
    words: Sequence[Any],
    store: Path,
    timeout_s: float,
    environment: dict[str, str],
) -> None:
    become_own_process({**environment, "LOCAL_RANK": str(rank), "TMPDIR": str(store.parent)})
    tempfile.tempdir = None  # what checks leave goes with the folder of the test
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.new_group = shared_group
    body(rank, *words)
    differing = differing_requests()
    assert not differing, differing
    dist.destroy_process_group()


def _check_all(rank: int, checks: Sequence[Check], folder: Path) -> None:
    for check in checks:
        torch.manual_seed(0)
        try:
            check(rank)
            outcome = PASSED
        except Exception:
            outcome = traceback.format_exc()
        _record(folder / f"rank{rank}.jsonl", check, outcome)
        # Also a barrier: a rank that leaves while another still connects a group ends that one.
        _record(folder / f"rank{rank}.jsonl", check, differing_requests() or PASSED)
        end_engines()


def _record(file: Path, check: Check, outcome: str) -> None:
    """Append the outcome of `check`, in place of an earlier one; fail unless it is PASSED."""
    with file.open("a") as stream:
        stream.write(json.dumps([check.__name__, outcome]) + "\n")
    assert outcome == PASSED, outcome
