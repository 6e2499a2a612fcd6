"""What tools/merge_preprocessed_data.py reads and writes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """The merge of token files, as the user asked for it."""

    datasets: list[str]
    """Paths of .bin/.idx pairs without the suffix; their documents keep this order."""

    output_prefix: str
    """Path of the new pair without the suffix."""

    merge: Literal["serial", "distributed"] = "serial"
    """Who copies: one process, or several that each copy a part."""

    workers: int | None = None
    """Processes of a distributed merge (default: as many as there are CPUs)."""
