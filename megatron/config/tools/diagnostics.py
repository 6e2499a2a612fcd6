"""The doctor and the monitor of a run: flags."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What to look at, and where to write what was found."""

    nproc: int = 1
    """Processes to start on this machine, between which all-reduce and clocks are measured; a
    launcher starts its own."""

    path: str = "."
    """Folder whose disk is measured, such as the one for checkpoints."""

    json: str | None = None
    """File to write the report to, for other programs."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Which run to look at, and how."""

    run_dir: str
    """Directory that the run saves to (its --save); may stand first, without the flag."""

    once: bool = False
    """Tell how the run stands, and end."""

    html: str | None = None
    """Write a page with curves, events and settings to this file, and end."""

    every: float = 5.0
    """Seconds between two looks at the journal."""
