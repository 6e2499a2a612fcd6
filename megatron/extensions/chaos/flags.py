"""Fault injection (--chaos): flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from megatron.config.config import Config
from megatron.config.parsing.flags import finite_or_none
from megatron.config.run.checkpoint import goes_on


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Faults of a run that is to survive them."""

    chaos: str | None = None
    """Fault injection, to prove that the run and its cluster survive:
    KEY=NUMBER,KEY=NUMBER. seed; chances for each step and rank: kill, stall (for stall_s seconds, 60); for each save and rank: kill_save, slow_disk (slow_disk_s seconds a file, 1),
    full_disk; for each checkpoint: flip a bit, truncate a file. Never for a run to be kept."""


SECTIONS = {"chaos": ChaosConfig}


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """Probability of each fault: per step, or per save, and rank. 0: never.

    Files of a checkpoint are rank 0's: `flip` and `truncate` strike once a save.
    """

    seed: int = 0
    kill: float = 0.0  # a process, before a step
    stall: float = 0.0  # a process stands still before a step
    kill_save: float = 0.0  # a process, while it writes a checkpoint
    slow_disk: float = 0.0  # each file of a save waits
    full_disk: float = 0.0  # a file of a save is written by half
    flip: float = 0.0  # one bit of a published checkpoint
    truncate: float = 0.0  # one file of a published checkpoint
    stall_s: float = 60.0
    slow_disk_s: float = 1.0  # for each file

    @property
    def is_on(self) -> bool:
        """Whether any fault can happen."""
        return any(getattr(self, kind) for kind in FAULTS)


FAULTS = ("kill", "stall", "kill_save", "slow_disk", "full_disk", "flip", "truncate")

_WORDS = {field.name: field.type for field in fields(ChaosPlan)}


def plan_chaos(config: Config) -> ChaosPlan:
    """Return the faults of --chaos."""
    text = config.section(ChaosConfig).chaos
    given: dict[str, Any] = {key: finite_or_none(number) for key, number in _pairs(text or "")}
    return ChaosPlan(**given | {"seed": int(given.get("seed", 0))})


def chaos_problems(config: Config, *, trains: bool) -> Iterator[str]:
    """Yield every problem of --chaos."""
    text, checkpoint = config.section(ChaosConfig).chaos, config.checkpoint
    if text is None:
        return
    for key, number in _pairs(text):
        value = finite_or_none(number)
        if key not in _WORDS:
            yield f"--chaos {text}: {key} is not one of {', '.join(_WORDS)}"
        elif value is None or value < 0:
            yield f"--chaos {text}: {key} is a number from 0 on, not {number!r}"
        elif key in FAULTS and value > 1:
            yield f"--chaos {text}: {key} is a chance, from 0 to 1, not {number}"
        elif key == "seed" and value != int(value):
            yield f"--chaos {text}: seed is an integer, not {number}"
    given = dict(_pairs(text))
    if "seed" not in given:
        yield f"--chaos {text}: add seed=NUMBER, so that the same faults can come again"
    if not any(kind in given for kind in FAULTS):
        yield f"--chaos {text}: names no fault: give a chance to any of {', '.join(FAULTS)}"
    if not trains:
        yield "--chaos is for training: leave it out with --eval-only"
    if not goes_on(checkpoint):
        yield "--chaos needs --save and the same directory as --load, to resume from"
    keeps_one = checkpoint.keep_last == 1 or (checkpoint.keep_every and not checkpoint.keep_last)
    if keeps_one and {"flip", "truncate"} & set(given):
        yield (
            "--chaos damages the newest checkpoint, and needs an older one to be left: write "
            "--keep-last 2 or more, or take flip and truncate out"
        )


def _pairs(text: str) -> list[tuple[str, str]]:
    words = (word.partition("=") for word in text.split(",") if word)
    return [(key.strip(), number.strip()) for key, _, number in words]
