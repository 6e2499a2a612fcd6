"""Flags of the cleaning of a corpus by many tasks."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """Cleaning of a corpus, by tasks on one machine or many."""

    filters: list[str] = field(default_factory=lambda: ["cleanup_dataset"])
    """Filters of each document, in this order, until one drops it: cleanup_dataset, a task of
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
    """Executor of the tasks: --workers processes of this machine, an array of SLURM jobs, or a Ray
    cluster. The last two need the package datatrove."""

    tasks: int | None = None
    """Tasks of each step (default: --workers). The output does not depend on it."""

    slurm: list[str] = field(default_factory=list)
    """Options of sbatch for --executor slurm: NAME=VALUE; time and partition are required."""


@dataclass(frozen=True, kw_only=True)
class WikipediaConfig:
    """A dump of Wikipedia to be turned into token files."""

    dump: str
    """Dump of the articles, such as enwiki-20260101-pages-articles.xml.bz2, compressed or not."""

    licence: str = "CC BY-SA 4.0; https://dumps.wikimedia.org/legal.html"
    """Licence of the text, for the report."""


@dataclass(frozen=True, kw_only=True)
class PublishedConfig:
    """A published data set to be turned into token files."""

    config_name: str | None = None
    """Configuration, or subset, of a data set of the Hugging Face hub, such as sample-10BT (default:
    the data set's own)."""

    split_name: str = "train"
    """Split of the data set in the folder --input."""

    licence: str | None = None
    """Licence of the text, for the report (default: from the data set's card)."""

    date: str | None = None
    """Date of the source, for the report (default: when the newest file was changed)."""


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Web pages to be fetched, and how politely."""

    urls: str
    """File with one URL a line, such as tools/openwebtext/blacklist_urls.py writes."""

    pages: str
    """Output: a file of JSON lines with url, title, date and text."""

    user_agent: str = "megatron-deepspeed-fetch"
    """Name that hosts get, and to which their robots.txt may give rules; add an address for
    complaints."""

    host_delay_s: float = 5.0
    """Pause between two requests to a host, in seconds, if its robots.txt has no longer one."""

    request_timeout_s: float = 20.0
    """Longest wait for an answer, in seconds."""

    max_page_mb: float = 10.0
    """Size above which a page is left out."""

    threads: int = 32
    """Hosts that are visited at the same time."""
