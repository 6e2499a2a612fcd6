"""What can be asked of the tool that looks at runs."""

from dataclasses import dataclass


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
