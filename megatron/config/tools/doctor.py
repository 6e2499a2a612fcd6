"""What can be asked of the doctor, besides the flags of training."""

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
