"""Calibration of the planner's times by a measured table of one GPU."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, DataError, reason
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.planner.devices import Device, known_device
from megatron.planner.speed import speed_of

_VOCAB_SIZE = 50257


@dataclass(frozen=True)
class Calibration:
    """How much longer a rank computes than by the roofline, and where that is known from.

    Args:
        span: measured steps took from the first to the last of these factors of the time that is
            estimated with `slowdown`; one where the time is known.
    """

    slowdown: float
    span: tuple[float, ...]
    source: str


ROOFLINE = Calibration(
    1.0,
    (0.9, 1.25),
    "a roofline: no run of this program has been measured, and runs of other programs took 0.9 to "
    "1.25 of its times (--measured FILE calibrates it)",
)
"""The span is that of tests/golden/published_runs.md."""


def read_calibration(path: str, device: Device) -> Calibration:
    """Return the mean ratio of measured to estimated times in the results of tests/gpu/prove.sh.

    Raises:
        DataError: the file cannot be read.
        ConfigError: it has no results of this kind of GPU.
    """
    try:
        speed = json.loads(Path(path).read_text())["speed"]
        card = speed["device"]
        known = known_device(card["name"], card["memory_bytes"] or 0)
        rows = [row for row in speed["rows"] if "seconds" in row["ours"] and not row["flags"]]
        ratios = [_ratio(row, device) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"--measured {path} cannot be read: {reason(error)}") from error
    if known != device:
        raise ConfigError(
            f"--measured {path} is of {card['name']}, which is not --gpu {device.name}"
        )
    if not ratios:
        raise ConfigError(f"--measured {path} has no row with a time of a step")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return Calibration(
        mean,
        (min(ratios) / mean, max(ratios) / mean),
        f"the roofline times {mean:.2f}, the mean of {len(ratios)} measured on {card['name']} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
    )


def _ratio(row: dict[str, Any], device: Device) -> float:
    common = f"--micro-batch-size {row['batch']} --lr 1e-4 --train-iters 1 --data-path none"
    dropout = "--attention-dropout 0 --hidden-dropout 0"
    config, _ = parse_config([*common.split(), *dropout.split(), *row["all_flags"]])
    decided = plan(config, world_size=1, vocab_size=_VOCAB_SIZE, device="cuda")
    measured: float = row["ours"]["seconds"]
    return measured / speed_of(decided, device).step_s
