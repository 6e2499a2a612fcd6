"""Flags of the cleaning of a corpus by many tasks."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """Cleaning of a corpus, by tasks on one machine or many."""

    filters: list[str] = field(default_factory=lambda: ["cleanup_dataset"])
    """What to do with each document, in this order, until one drops it: cleanup_dataset, a task of
    tools/openwebtext/cleanup_fix_dataset.py, or a filter of datatrove: c4_paragraphs, c4_quality,
    fineweb_quality, gopher_quality, gopher_repetition; none for no filter."""

    similarity: float = 0.7
    """Drop a document that shares more than this part of its 5-character shingles with an earlier
    one; 1 keeps all."""

    num_bands: int = 20
    """Pieces of a MinHash fingerprint; documents that agree in one are compared.
    Corpora of many millions of documents need more numbers in a band: 75 bands of 675 numbers."""

    num_seeds: int = 100
    """Numbers in a fingerprint; a multiple of the bands."""

    evaluations: list[str] = field(default_factory=list)
    """Evaluations whose 13-grams to take out, and a file of each: NAME FILE NAME FILE. Names as in
    tools/openwebtext/filter_ngrams.py."""

    executor: Literal["local", "slurm", "ray"] = "local"
    """What runs the tasks: --workers processes of this machine, an array of SLURM jobs, or a Ray
    cluster. The last two need the package datatrove."""

    tasks: int | None = None
    """Tasks of each step (default: --workers). The output does not depend on it."""

    slurm: list[str] = field(default_factory=list)
    """Options of sbatch for --executor slurm: NAME=VALUE; time and partition are required."""
