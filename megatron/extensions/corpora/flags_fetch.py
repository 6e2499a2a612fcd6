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
