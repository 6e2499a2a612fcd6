"""The doctor and the monitor of a run: flags."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Tests of this machine and its network before a run."""

    nproc: int = 1
    """Processes to start on this machine, between which all-reduce and clocks are measured; a
    launcher starts its own."""

    path: str = "."
    """Folder whose disk is measured, such as the one for checkpoints."""

    json: str | None = None
    """File to write the report to, for other programs."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """The run to monitor, and how."""

    run_dir: str
    """The --save directory of a run; may be given as the first argument."""

    once: bool = False
    """Print the state of the run, and exit."""

    html: str | None = None
    """Write a page with curves, events and settings to this file, and exit."""

    compare: list[str] | None = None
    """Directories of other runs, which the page of --html compares with the first one."""

    every: float = 5.0
    """Seconds between two readings of the journal."""
