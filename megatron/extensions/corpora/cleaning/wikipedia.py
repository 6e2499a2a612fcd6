"""Wikipedia dumps: pages of MediaWiki's XML, and their wiki markup as plain text."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from megatron.common.errors import ConfigError, DataError, needed_for
from megatron.common.process_pool import ordered_map
from megatron.common.remote_files import open_input, size_of_input
from megatron.data.preprocessing.recipe import write_report
from megatron.data.readers.decompress import UnreadableFormatError, decompress
from megatron.extensions.corpora.cleaning.records import Progress, read_errors_name, to_bytes
from megatron.extensions.corpora.cleaning.resumable import resumable_output

_HIDDEN_NAMESPACES = (6, 14)  # of files and categories, whose links are no text
_HIDDEN_TAGS = {"ref", "references", "table", "gallery", "timeline", "math", "score", "imagemap"}
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*")  # before the title in a link to another language
_SPACES = re.compile(r"[ \t\u00a0]+")
_BLANK_LINES = re.compile(r"\n\s*\n\s*")
_DATE = re.compile(r"-(\d{4})(\d\d)(\d\d)-")
_BATCH_CHARACTERS = 1 << 18  # a killed run loses a few of these for each worker


@dataclass(frozen=True)
class Page:
    """A page of a dump, in its newest revision."""

    id: str
    revision: str
    title: str
    namespace: int
    is_redirect: bool
    is_wikitext: bool
    markup: str


@dataclass
class Dump:
    """A file of pages, and the site's description in its header."""

    path: str
    site: str = ""
    url: str = ""
    hidden: frozenset[str] = field(default_factory=frozenset)  # names of _HIDDEN_NAMESPACES

    @property
    def source(self) -> dict[str, Any]:
        """Name, size and date of the dump."""
        name = os.path.basename(self.path)
        date = _DATE.search(name)
        return {
            "dump": name,
            "bytes": size_of_input(self.path),
            "date": "-".join(date.groups()) if date else None,
        }

    def pages(self) -> Iterator[Page]:
        """Yield the pages, with memory for one.

        Raises:
            DataError: the file is damaged, incomplete, or no dump.
        """
        root, progress = None, Progress(size_of_input(self.path))
        before = 0
        try:
            for event, element, position in self._elements():
                name = element.tag.rpartition("}")[2]
                if root is None:
                    root = element
                    if name != "mediawiki":
                        raise DataError(f"{self.path} is no dump of MediaWiki, but of <{name}>")
                elif event == "end" and name == "siteinfo":
                    self._read_header(element)
                elif event == "end" and name == "page":
                    progress.add(position - before)
                    before = position
                    yield _page(element)
                    root.clear()
        finally:
            progress.close()

    def _elements(self) -> Iterator[tuple[str, Any, int]]:
        """Yield events of the XML parser, with the position in the file."""
        parser: XMLPullParser[Any] = XMLPullParser(("start", "end"))
        try:
            with read_errors_name(self.path), open_input(self.path) as file:
                for piece in decompress(file):
                    parser.feed(piece)
                    for found in parser.read_events():
                        yield *found, file.tell()
                parser.close()
        except (ParseError, ValueError, EOFError, UnreadableFormatError) as error:
            raise DataError(f"{self.path} is damaged or incomplete: {error}") from error

    def _read_header(self, header: Element) -> None:
        self.site = header.findtext("{*}dbname") or header.findtext("{*}sitename") or ""
        self.url = header.findtext("{*}base") or ""
        keys = {str(key) for key in _HIDDEN_NAMESPACES}
        names = {
            each.text.lower()
            for each in header.iterfind("{*}namespaces/{*}namespace")
            if each.get("key") in keys and each.text
        }
        self.hidden = frozenset(names | {"file", "image", "category"})  # valid in all languages


def _page(element: Element) -> Page:
    revision = element.findall("{*}revision")[-1:] or [Element("revision")]
    return Page(
        id=element.findtext("{*}id") or "",
        revision=revision[0].findtext("{*}id") or "",
        title=element.findtext("{*}title") or "",
        namespace=int(element.findtext("{*}ns") or 0),
        is_redirect=element.find("{*}redirect") is not None,
        is_wikitext=(revision[0].findtext("{*}model") or "wikitext") == "wikitext",
        markup=revision[0].findtext("{*}text") or "",
    )


def require_parser() -> None:
    """Import the parser of wiki markup.

    Raises:
        ConfigError: it is not installed.
    """
    with needed_for("wiki markup", "mwparserfromhell"):
        import mwparserfromhell  # noqa: F401


def plain_text(markup: str, hidden: frozenset[str]) -> str:
    """Return the text of wiki markup: without templates, tables, references, files and categories.

    Args:
        hidden: lower-case names of the namespaces whose links are no text.
    """
    import mwparserfromhell

    from megatron.extensions.corpora.cleaning.repair import fix_text

    code = mwparserfromhell.parse(markup)
    others = code.RECURSE_OTHERS  # not into removed tags
    for tag in code.filter_tags(others, matches=lambda t: str(t.tag).lower() in _HIDDEN_TAGS):
        code.remove(tag)
    for link in code.filter_wikilinks(others, matches=lambda w: _is_hidden(str(w.title), hidden)):
        code.remove(link)
    text = fix_text(code.strip_code())
    lines = (_SPACES.sub(" ", line).strip() for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def _is_hidden(title: str, hidden: frozenset[str]) -> bool:
    prefix, colon, _ = title.strip().partition(":")
    name = prefix.strip()
    return bool(colon) and (name.lower() in hidden or bool(_LANGUAGE.fullmatch(name)))


@dataclass(frozen=True)
class _Batch:
    """Pages whose markup is parsed in one process."""

    pages: tuple[Page, ...]
    hidden: frozenset[str]
    url: str


def _lines(batch: _Batch) -> list[bytes | None]:
    """Return the JSON line of each article; None of a page without text."""
    return [_line(page, batch) for page in batch.pages]


def _line(page: Page, batch: _Batch) -> bytes | None:
    text = plain_text(page.markup, batch.hidden)
    if not text:
        return None
    url = f"{batch.url.rpartition('/')[0]}?curid={page.id}"
    record = {"id": page.id, "revid": page.revision, "url": url, "title": page.title}
    return to_bytes({**record, "text": text})


def extract_articles(
    dump_path: str, out_path: str, report_path: str, *, licence: str, workers: int
) -> dict[str, Any]:
    """Write the articles of a dump as JSON lines with id, revid, url, title and text.

    An attempt that was stopped is continued; articles that are complete are kept.

    Returns:
        The report, which is also written: the source, and the numbers of pages of each kind.

    Raises:
        ConfigError: `out_path` has the articles of another dump, or the parser is not installed.
        DataError: the dump is damaged, or there is no article in it.
    """
    dump = Dump(dump_path)
    with read_errors_name(dump_path):
        source = dump.source
    if Path(out_path).exists():
        return _finished_report(out_path, report_path, source)
    require_parser()
    counts: Counter[str] = Counter()
    with resumable_output(out_path, source, inputs=[dump_path]) as output:
        articles = _articles(dump, counts)
        _skip(articles, map(json.loads, output.lines()), counts, f"{out_path}.partial")
        for lines in ordered_map(_lines, _batches(dump, articles), workers):
            found = [line for line in lines if line is not None]
            output.write(*found)
            counts["articles"] += len(found)
            counts["without text"] += len(lines) - len(found)
        if not counts["articles"]:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in counts.items()) or "no page"
            raise DataError(f"{dump_path} has no article ({kinds}): is it a dump of articles?")
        about = {**source, "site": dump.site, "url": dump.url, "licence": licence}
        report = {"source": about, "pages": dict(counts)}
        write_report(report_path, report)
    return report


def _finished_report(out_path: str, report_path: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of articles that are complete.

    Raises:
        ConfigError: they are of another dump.
    """
    try:
        report = json.loads(Path(report_path).read_text(encoding="utf-8"))
        theirs = {name: report["source"].get(name) for name in source}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        report, theirs = {}, {}
    if theirs != source:
        raise ConfigError(
            f"{out_path} is there, but {report_path} does not say that it has the articles of "
            f"{source['dump']}: remove it, or give another --output-prefix"
        )
    return dict(report)


def _articles(dump: Dump, counts: Counter[str]) -> Iterator[Page]:
    """Yield the pages that are articles, and count all pages by kind."""
    for page in dump.pages():
        counts["pages"] += 1
        if page.namespace != 0:
            counts["other namespaces"] += 1
        elif page.is_redirect:
            counts["redirects"] += 1
        elif not page.is_wikitext:
            counts["not wikitext"] += 1
        else:
            yield page


def _skip(
    articles: Iterator[Page], earlier: Iterable[Mapping[str, Any]], counts: Counter[str], path: str
) -> None:
    """Skip the articles that earlier attempts wrote.

    Raises:
        ConfigError: the dump does not have them.
    """
    for record in earlier:
        for page in articles:
            if page.id == record["id"]:
                counts["articles"] += 1
                break
            counts["without text"] += 1
        else:
            raise ConfigError(f"{path} has articles that are not in the dump: remove it")


def _batches(dump: Dump, articles: Iterator[Page]) -> Iterator[_Batch]:
    pages: list[Page] = []
    size = 0
    for page in articles:
        pages.append(page)
        size += len(page.markup)
        if size >= _BATCH_CHARACTERS:
            yield _Batch(tuple(pages), dump.hidden, dump.url)
            pages, size = [], 0
    if pages:
        yield _Batch(tuple(pages), dump.hidden, dump.url)
