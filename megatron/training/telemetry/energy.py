"""Energy and CO2 of the run, measured by codecarbon on one process of each node."""

import csv
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ConfigError, reason
from megatron.config.run.logging import EnergyPlan
from megatron.training.telemetry.meters import CO2, ENERGY

log = logging.getLogger(__name__)

_MEASURE_S = 15
_COLUMNS = (
    "timestamp",
    "iteration",
    "consumed_samples",
    "duration_s",
    "energy_kwh",
    "emissions_kg",
    "total_energy_kwh",
    "total_emissions_kg",
)


class Energy:
    """Measures since the start of the run, and since the first start of a chain of runs.

    Every node has a row for each log line in `directory`/emissions-RANK.csv: what it took since
    this start, and in total since the file began. Without power meters codecarbon estimates from
    the processor's name and load.

    Args:
        rank: of this process; the first of its node measures.
        measures: whether this is it.
        interval: iterations between rows.
    """

    def __init__(self, plan: EnergyPlan, *, rank: int, measures: bool, interval: int):
        self._interval = interval
        self._directory = plan.directory
        self._started_at = time.perf_counter()
        self._last: Any = None
        self._tracker: Any = None
        if measures:
            self._file = Path(plan.directory) / f"emissions-{rank:03d}.csv"
            self._before = _open_file(self._file)
            self._tracker = _start_tracker(plan.country, self)

    def __call__(self, state: TrainState) -> Mapping[str, float]:
        """Return the totals of all nodes when a log line is due.

        Communication: one all-reduce of two numbers over all ranks, when it is due.
        """
        if state.iteration % self._interval:
            return {}
        energy_kwh, emissions_kg = _over_ranks(self._record(state))
        return {ENERGY: energy_kwh, CO2: emissions_kg}

    def out(self, total: Any, delta: Any) -> None:
        """Take codecarbon's measurements since its start; it calls this."""
        self._last = total

    def live_out(self, total: Any, delta: Any) -> None:
        """Take the same, from its regular measurement."""
        self._last = total

    def exit(self) -> None:
        """Do nothing: codecarbon calls this when it stops."""

    def close(self, state: TrainState) -> None:
        """Write the last row, stop measuring, and log the energy of all nodes.

        Communication: one all-reduce of four numbers over all ranks.
        """
        total = self._record(state)
        before = self._before if self._tracker is not None else (0.0, 0.0)
        if self._tracker is not None:
            self._tracker.stop()
            self._tracker = None
        energy, co2, energy_before, co2_before = _over_ranks((*total, *before))
        log.info(
            "energy of this start: %.6f kWh, %.6f kg of CO2 | since the record began: %.6f kWh, "
            "%.6f kg of CO2 | by node: %s",
            *(energy - energy_before, co2 - co2_before, energy, co2),
            Path(self._directory) / "emissions-*.csv",
        )

    def _record(self, state: TrainState) -> tuple[float, float]:
        """Append a row; return this node's totals."""
        if self._tracker is None:
            return 0.0, 0.0
        self._tracker.flush()
        energy_kwh, emissions_kg = self._last.energy_consumed, self._last.emissions
        totals = self._before[0] + energy_kwh, self._before[1] + emissions_kg
        row = (
            time.strftime("%Y-%m-%dT%H:%M:%S"),
            state.iteration,
            state.samples,
            f"{time.perf_counter() - self._started_at:.1f}",
            *(f"{value:.9f}" for value in (energy_kwh, emissions_kg, *totals)),
        )
        with self._file.open("a", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerow(row)
        return totals


def _over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums over all ranks. Communication: one all-reduce of these numbers."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def _open_file(file: Path) -> tuple[float, float]:
    """Return the totals in `file`, which is created if it is missing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            with file.open("w", encoding="utf-8", newline="") as stream:
                csv.writer(stream).writerow(_COLUMNS)
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        last = rows[-1] if rows else dict.fromkeys(_COLUMNS, 0.0)
        return float(last["total_energy_kwh"]), float(last["total_emissions_kg"])
    except OSError as error:
        raise ConfigError(
            f"--codecarbon-dir {file.parent}: {reason(error, file.parent)}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no record of energy of this program; move it away") from error


def _start_tracker(country: str, output: Energy) -> Any:
    # It explains itself at length, also that this machine has no power meter.
    logging.getLogger("codecarbon").setLevel(logging.ERROR)
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        country_iso_code=country,
        measure_power_secs=_MEASURE_S,
        save_to_file=False,
        output_handlers=[output],
        allow_multiple_runs=True,
        log_level="error",
    )
    tracker.start()
    return tracker
