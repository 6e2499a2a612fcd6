"""Corpus recipes: flags of the tools that turn published sources into token files."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WikipediaConfig:
    """A dump of Wikipedia to be turned into token files."""

    dump: str
    """Dump of the articles, such as enwiki-20260101-pages-articles.xml.bz2, compressed or not."""

    licence: str = "CC BY-SA 4.0; https://dumps.wikimedia.org/legal.html"
    """Licence of the text, for the report."""
