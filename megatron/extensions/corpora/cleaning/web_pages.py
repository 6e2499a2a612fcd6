"""Web pages: a scraper that obeys robots.txt and pauses between requests to a host; text extraction."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from queue import SimpleQueue
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener
from urllib.robotparser import RobotFileParser

from megatron.common.errors import needed_for

Extract = Callable[[bytes, str], dict[str, Any] | None]
"""Turns a page and its URL into a record with its text, or None if it has no text."""

_PIECE_BYTES = 1 << 16
_PAGE_TYPES = ("text/html", "application/xhtml+xml")
_ROBOTS_BYTES = 500 << 10  # that a crawler has to read, by RFC 9309
_SERVER_ERRORS = 500  # codes from here on
_SLOWEST = 10  # times the time-out, for all of a page


@dataclass(frozen=True, kw_only=True)
class Manners:
    """Limits of a scraper.

    Args:
        delay_s: between two requests to a host, if its robots.txt has no longer one.
    """

    user_agent: str
    delay_s: float
    timeout_s: float
    max_bytes: int


@dataclass(frozen=True)
class Visit:
    """A URL that was visited: the record of its text, or why there is none, perhaps for a time."""

    url: str
    record: dict[str, Any] | None
    problem: str = ""
    is_temporary: bool = False


class PageError(Exception):
    """A page cannot be fetched. The message omits the URL."""

    is_temporary = False


class TemporaryPageError(PageError):
    """A page cannot be fetched, but may be another time."""

    is_temporary = True


def visit_pages(
    urls: Iterable[str], manners: Manners, extract: Extract, *, threads: int
) -> Iterator[Visit]:
    """Fetch pages and yield each as soon as it is there; a host has one request at a time.

    Source: RFC 9309 for robots.txt.
    """
    by_host: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        by_host[_host_of(url)].append(url)
    done: SimpleQueue[Visit | BaseException] = SimpleQueue()
    stop = threading.Event()

    def visit_host(urls: list[str]) -> None:
        try:
            host = _Host(manners, stop)
            for url in urls:
                done.put(_visit(host, url, extract))
        except BaseException as error:  # re-raised where the pages are read
            done.put(error)

    pool = ThreadPoolExecutor(threads)
    try:
        for host_pages in by_host.values():
            pool.submit(visit_host, host_pages)
        for _ in range(sum(map(len, by_host.values()))):
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def build_extractor() -> Extract:
    """Return the text extraction of trafilatura.

    Raises:
        ConfigError: it is not installed.
    """
    with needed_for("text of web pages", '"trafilatura>=2"'):
        from trafilatura import bare_extraction

    def extract(page: bytes, url: str) -> dict[str, Any] | None:
        try:
            found = bare_extraction(page, url=url, include_comments=False, with_metadata=True)
        except Exception as error:  # of any kind: a page may be as damaged as it likes
            raise PageError(f"no text can be extracted: {error}") from error
        if found is None or not found.text:
            return None
        return {"url": url, "title": found.title, "date": found.date, "text": found.text}

    return extract


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _visit(host: "_Host", url: str, extract: Extract) -> Visit:
    try:
        record = extract(host.fetch(url), url)
    except PageError as error:
        return Visit(url, None, str(error), error.is_temporary)
    return Visit(url, record, "" if record else "no text")


class _Host:
    """One host: its robots.txt, and the time of its last request."""

    def __init__(self, manners: Manners, stop: threading.Event):
        self._manners, self._stop = manners, stop
        self._opener = build_opener(_SameHost(self._allows))
        self._rules: RobotFileParser | None = None
        self._silence: TemporaryPageError | None = None  # instead of rules
        self._delay_s = manners.delay_s
        self._next_at = 0.0

    def fetch(self, url: str) -> bytes:
        """Return a page.

        Raises:
            PageError: it is missing, forbidden, too large or no page.
        """
        if not (_host_of(url) and url.lower().startswith(("http://", "https://"))):
            raise PageError("no valid URL")
        if self._silence is not None:
            raise self._silence
        if self._rules is None:
            try:
                self._rules = self._read_rules(url)
            except TemporaryPageError as error:
                self._silence = error
                raise
        if not self._allows(url):
            raise PageError("robots.txt")
        return self._read(url, self._manners.max_bytes, is_page=True)

    def _allows(self, url: str) -> bool:
        """Whether robots.txt allows a URL of this host; before it is read, it does."""
        return self._rules is None or self._rules.can_fetch(self._manners.user_agent, url)

    def _read_rules(self, url: str) -> RobotFileParser:
        """Return the rules of robots.txt; none if it is missing.

        Raises:
            TemporaryPageError: the host does not answer.
        """
        rules = RobotFileParser()
        parts = urlsplit(url)
        try:
            text = self._read(f"{parts.scheme}://{parts.netloc}/robots.txt", _ROBOTS_BYTES)
            rules.parse(text.decode("utf-8", "replace").splitlines())
        except PageError as error:
            if error.is_temporary:
                raise
            rules.parse([])
        pause = rules.crawl_delay(self._manners.user_agent)
        self._delay_s = max(self._delay_s, float(pause or 0))
        return rules

    def _read(self, url: str, max_bytes: int, *, is_page: bool = False) -> bytes:
        self._stop.wait(max(self._next_at - time.monotonic(), 0))
        if self._stop.is_set():
            raise TemporaryPageError("stopped")
        try:
            request = Request(url, headers={"User-Agent": self._manners.user_agent})
            timeout_s = self._manners.timeout_s
            with self._opener.open(request, timeout=timeout_s) as response:
                kind = response.headers.get_content_type()
                if is_page and kind not in _PAGE_TYPES:
                    raise PageError(f"a file of type {kind}")
                return _body(response, max_bytes, time.monotonic() + _SLOWEST * timeout_s)
        except HTTPError as error:
            kind = PageError if error.code < _SERVER_ERRORS else TemporaryPageError
            raise kind(f"HTTP {error.code}") from error
        except ValueError as error:
            raise PageError(f"no valid URL: {error}") from error
        except (OSError, HTTPException) as error:
            raise TemporaryPageError(str(error)) from error
        finally:
            self._next_at = time.monotonic() + self._delay_s


def _body(response: Any, max_bytes: int, deadline: float) -> bytes:
    body = b""
    while piece := response.read1(_PIECE_BYTES):
        body += piece
        if len(body) > max_bytes:
            raise PageError("too large")
        if time.monotonic() > deadline:
            raise TemporaryPageError("too slow")
    return body


class _SameHost(HTTPRedirectHandler):
    """Follows redirects within a host only, and to pages its robots.txt allows."""

    def __init__(self, allows: Callable[[str], bool]):
        self._allows = allows

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        before, after = (_host_of(url).removeprefix("www.") for url in (req.full_url, newurl))
        if before != after:
            raise PageError(f"a redirect to {after or newurl}")
        if not self._allows(newurl):
            raise PageError("a redirect to what robots.txt forbids")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
