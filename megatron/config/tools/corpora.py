"""Corpus recipes: flags of the tools that turn published sources into token files."""

from dataclasses import dataclass


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
    """Licence of the text, for the report (default: that of the data set's card)."""

    date: str | None = None
    """Date of the source, for the report (default: when the newest file was changed)."""
