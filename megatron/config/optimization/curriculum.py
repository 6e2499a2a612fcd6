"""Curriculum learning (sequence length warm-up), from the block of DeepSpeed's JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KEY = "curriculum_learning"

_SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete")


@dataclass(frozen=True, kw_only=True)
class CurriculumPlan:
    """The sequence length as a function of the iteration. Every field is decided.

    Source: DeepSpeed's `curriculum_learning` (arXiv:2108.06084).
    """

    schedule: str  # "": every sequence has its full length
    start: int  # tokens per sample
    stop: int  # tokens per sample after the schedule; the model's length without one
    iterations: int  # until `stop` is reached
    multiple: int  # lengths are multiples of so many tokens
    root: float  # 1: linear
    stairs: tuple[tuple[int, int], ...]  # (last iteration, tokens per sample) of fixed_discrete

    def length_at(self, iteration: int) -> int:
        """Return the tokens per sample of the step that is number `iteration`, from 1 on."""
        if not self.schedule or iteration > self.iterations:
            return self.stop
        if self.stairs:
            return next(length for last, length in self.stairs if iteration <= last)
        done = (iteration / self.iterations) ** (1 / self.root)
        length = int(self.start + done * (self.stop - self.start))
        return min(length - length % self.multiple, self.stop)


def plan_curriculum(user: Mapping[str, Any], seq_length: int) -> CurriculumPlan:
    """Return the decided lengths, once `curriculum_problems` finds nothing."""
    if not has_curriculum(user):
        return CurriculumPlan(
            schedule="",
            start=seq_length,
            stop=seq_length,
            iterations=0,
            multiple=1,
            root=1.0,
            stairs=(),
        )
    block = user[KEY]
    schedule, settings = block["schedule_type"], block["schedule_config"]
    if schedule == "fixed_discrete":
        lengths, lasts = settings["difficulty"], settings["max_step"]
        return CurriculumPlan(
            schedule=schedule,
            start=lengths[0],
            stop=lengths[-1],
            iterations=lasts[-1],
            multiple=1,
            root=1.0,
            stairs=tuple(zip(lasts, lengths, strict=False)),
        )
    return CurriculumPlan(
        schedule=schedule,
        start=block["min_difficulty"],
        stop=block["max_difficulty"],
        iterations=settings["total_curriculum_step"],
        multiple=settings["difficulty_step"],
        root=float(settings["root_degree"]) if schedule == "fixed_root" else 1.0,
        stairs=(),
    )


def has_curriculum(user: Mapping[str, Any]) -> bool:
    """Whether the JSON turns a curriculum on."""
    block = user.get(KEY)
    return isinstance(block, Mapping) and block.get("enabled") is True


def curriculum_problems(
    user: Mapping[str, Any], *, seq_length: int, parts: int, file: str | None
) -> Iterator[str]:
    """Yield every problem of the block.

    Args:
        parts: every length must be a multiple of this, because processes divide the sequences.
    """
    if user.get(KEY) is not None and not isinstance(user[KEY], Mapping):
        yield f"{file}: {KEY} must be an object"
    if not has_curriculum(user):
        return
    problems = [*_block_problems(user[KEY], seq_length)]
    for problem in problems:
        yield f"{file}: {KEY}.{problem}"
    if problems:
        return
    plan = plan_curriculum(user, seq_length)
    lengths = [length for _, length in plan.stairs] if plan.stairs else [plan.multiple]
    odd = [length for length in (*lengths, plan.stop) if length % parts]
    if odd:
        yield (
            f"{file}: {KEY}: {parts} processes divide each sequence, and {odd[0]} tokens are not a "
            f"multiple of that; write multiples of {parts} for lengths and their steps"
        )


def _block_problems(block: Mapping[str, Any], seq_length: int) -> Iterator[str]:
    kind = block.get("curriculum_type", "seqlen")
    if kind != "seqlen":
        yield f"curriculum_type {kind!r} is unknown: only seqlen, the sequence length, can grow"
    schedule, settings = block.get("schedule_type"), block.get("schedule_config")
    if schedule not in _SCHEDULES:
        yield f"schedule_type {schedule!r} is not one of {', '.join(_SCHEDULES)}"
        return
    if not isinstance(settings, Mapping):
        yield "schedule_config must be an object"
    elif schedule == "fixed_discrete":
        yield from _stairs_problems(settings, seq_length)
    else:
        yield from _slope_problems(block, settings, schedule, seq_length)


def _stairs_problems(settings: Mapping[str, Any], seq_length: int) -> Iterator[str]:
    lengths: Any = settings.get("difficulty")
    lasts: Any = settings.get("max_step")
    if not (_are_numbers(lengths) and _are_numbers(lasts) and len(lengths) == len(lasts) + 1 > 1):
        yield (
            "schedule_config needs difficulty, a list of lengths, and max_step, the last iteration "
            "of each of them but the last"
        )
    elif max(lengths) > seq_length:
        yield f"schedule_config.difficulty {max(lengths)} is more than --seq-length {seq_length}"
    elif sorted(set(lasts)) != lasts:
        yield f"schedule_config.max_step {lasts} must rise"


def _slope_problems(
    block: Mapping[str, Any], settings: Mapping[str, Any], schedule: str, seq_length: int
) -> Iterator[str]:
    wanted: dict[str, Any] = {
        "min_difficulty": block.get("min_difficulty"),
        "max_difficulty": block.get("max_difficulty"),
        "schedule_config.total_curriculum_step": settings.get("total_curriculum_step"),
        "schedule_config.difficulty_step": settings.get("difficulty_step"),
    }
    if schedule == "fixed_root":
        wanted["schedule_config.root_degree"] = settings.get("root_degree")
    wrong = [name for name, value in wanted.items() if not _are_numbers([value])]
    for name in wrong:
        yield f"{name} is {wanted[name]!r}, expected a number of at least 1"
    if wrong:
        return
    first, last, step = (
        wanted[name]
        for name in ("min_difficulty", "max_difficulty", "schedule_config.difficulty_step")
    )
    if not first <= last <= seq_length:
        yield (
            f"min_difficulty {first} and max_difficulty {last} must rise and be at most "
            f"--seq-length {seq_length}"
        )
    if first % step or last % step:
        yield (
            f"min_difficulty {first} and max_difficulty {last} must be multiples of "
            f"schedule_config.difficulty_step {step}"
        )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 1 for v in values)
