"""How a run stands, in a few lines of words and numbers."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import mean
from typing import Any

from megatron.checkpointing.lock import dead_owner
from megatron.diagnostics.monitor.history import History, checkpoints_in, failure_now

_SILENT_S, _SILENT_STEPS = 120.0, 20
"""A run that tells nothing for so long, and for so many times a step, is called silent."""

NEXT_STEP = (
    "what to do: docs/troubleshooting.md, by what is printed; "
    "docs/stopping.md, for exit codes, failure.json and starting again"
)
"""For a run that somebody should look at."""

_RECENT = 20  # steps whose pace is told


def state_of(history: History, directory: Path, now: datetime) -> tuple[str, bool]:
    """Return what the run is doing, and whether somebody should look at it."""
    if history.end:
        return f"ended: {history.end.get('reason', '')}", False
    if failure := failure_now(history, directory):
        return f"failed in iteration {failure.iteration}: {failure.text}", True
    if owner := dead_owner(directory):
        return f"killed: {owner}, is gone, and left no word", True
    if history.last_at is None:
        return "nothing is known of when it last did something", False
    age_s = max(0.0, (now - history.last_at).total_seconds())
    if age_s > max(_SILENT_S, _SILENT_STEPS * _recent(history, "seconds", default=0.0)):
        return f"silent for {duration(age_s)}: killed, or in something that takes long", True
    return f"running: the last record is {duration(age_s)} old", False


def summary(history: History, directory: Path, now: datetime) -> Iterator[tuple[str, str]]:
    """Yield what there is to tell, each with its name."""
    last = history.intervals[-1] if history.intervals else {}
    yield "iteration", _place(history, last)
    if history.consumed:
        yield "consumed", ", ".join(f"{n:,} {name}" for name, n in history.consumed.items())
    if "eta_s" in last and not history.end:
        yield "left", f"{duration(last['eta_s'])}, as of iteration {last['iteration']}"
    if len(history.steps.iterations):
        yield "speed", _speed(history)
    yield from _of_interval(last)
    for name, record in {str(r.get("set")): r for r in history.evaluations}.items():
        told = f"loss {number(record.get('lm_loss'))}, perplexity {number(record.get('ppl'))}"
        yield f"{name} set", f"{told}, at iteration {record['iteration']}"
    if history.ranks:
        ranks = history.ranks[-1]
        where = f"rank {ranks.get('slowest')} on {ranks.get('host')}"
        yield "slowest", f"{where}: {number(ranks.get('slowness'))} times the median"
    yield "checkpoint", _newest(directory, history.iteration, now)


def duration(seconds: float | None) -> str:
    """Return a length of time for readers."""
    return (
        "?"
        if seconds is None or not math.isfinite(seconds)
        else str(timedelta(seconds=round(seconds)))
    )


def number(value: Any) -> str:
    """Return a number that a record tells; a loss that is none is null there."""
    return f"{value:.5g}" if isinstance(value, int | float) else "no number"


def _of_interval(last: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a log line tells of the devices."""
    if "tflops" in last:
        used = [f"{number(last['tflops'])} TFLOPs a process"]
        used += [
            f"{name} {last[name.lower()]:.1%}" for name in ("MFU", "HFU") if name.lower() in last
        ]
        yield "use", ", ".join(used)
    sizes = ("allocated", "reserved", "resident", "host_available")
    told = [
        f"{name.replace('_', ' ')} {last[f'{name}_gib']:.2f}"
        for name in sizes
        if f"{name}_gib" in last
    ]
    if told:
        yield "memory (GiB)", ", ".join(told)
    if "energy_kwh" in last:
        yield "energy", f"{number(last['energy_kwh'])} kWh, {number(last.get('co2_kg'))} kg of CO2"


def _place(history: History, last: dict[str, Any]) -> str:
    whole = last.get("train_iters")
    if not whole:
        return str(history.iteration)
    return f"{history.iteration} of {whole} ({history.iteration / whole:.1%})"


def _speed(history: History) -> str:
    curves = history.steps.curves
    recent = zip(curves["seconds"][-_RECENT:], curves["tokens_per_second"][-_RECENT:], strict=True)
    steps = [(seconds, seconds * pace) for seconds, pace in recent if math.isfinite(pace)]
    if not steps:
        return "not known"
    seconds, tokens = map(sum, zip(*steps, strict=True))
    return f"{1000 * seconds / len(steps):.1f} ms a step, {tokens / seconds:,.0f} tokens/s"


def _recent(history: History, curve: str, default: float = math.nan) -> float:
    known = _finite(history.steps.curves[curve][-_RECENT:])
    return mean(known) if known else default


def _newest(directory: Path, iteration: int, now: datetime) -> str:
    for newest in checkpoints_in(directory):
        age = duration(max(0.0, (now - newest.at).total_seconds()))
        return f"iteration {newest.iteration}, {iteration - newest.iteration} back, {age} ago"
    return "none yet"


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
