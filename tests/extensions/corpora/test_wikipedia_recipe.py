"""From a dump of Wikipedia to token files."""

import bz2
import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import pytest
from children import status_of_fork
from problems import problem

from megatron.common.errors import DataError
from megatron.data.token_files.indexed_dataset import IndexedDataset
from megatron.extensions.corpora.cleaning import wikipedia

TOOL = Path(__file__).resolve().parents[3] / "tools" / "corpora" / "wikipedia.py"
NAME = "dewiki-20260101-pages-articles.xml.bz2"
HEADER = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>dewiki</dbname>
    <base>https://de.wikipedia.org/wiki/Hauptseite</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Diskussion</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
PAGE = """  <page>
    <title>{title}</title>
    <ns>{ns}</ns>
    <id>{id}</id>{redirect}
    <revision>
      <id>{revision}</id>
      <timestamp>2025-12-30T10:00:00Z</timestamp>
      <model>{model}</model>
      <format>text/x-wiki</format>
      <text bytes="10" xml:space="preserve">{text}</text>
    </revision>
  </page>
"""


def page(number, text, *, ns=0, redirect="", model="wikitext"):
    return PAGE.format(
        title=f"Title {number}",
        ns=ns,
        id=number,
        redirect=redirect and f'\n    <redirect title="{redirect}" />',
        revision=number + 1000,
        model=model,
        text=text,
    )


PAGES = [
    page(1, "The first &amp; only."),
    page(2, "#REDIRECT [[Title 1]]", redirect="Title 1"),
    page(3, "Talk about it.", ns=1),
    page(4, " \n"),
    page(5, "The second one."),
    page(6, "{}", model="json"),
    *(
        page(i, f"Article {i} begins here and here and ends here. It has two sentences.")
        for i in range(7, 30)
    ),
]
NUM_ARTICLES = 25


class Markup:
    """A parser of markup without any."""

    RECURSE_OTHERS = 2
    fails_at = None

    def __init__(self, text):
        self.text = text

    def filter_tags(self, *_, **__):
        return []

    filter_wikilinks = filter_tags

    def strip_code(self):
        if self.fails_at and self.fails_at in self.text:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.text


@pytest.fixture
def folder(tmp_path, monkeypatch, modules):
    monkeypatch.chdir(tmp_path)
    modules("mwparserfromhell", parse=Markup)
    Markup.fails_at = None
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n.\nit\nthe\n")
    write_dump(tmp_path)
    return tmp_path


def write_dump(folder, pages=tuple(PAGES), *, end="</mediawiki>\n"):
    (folder / NAME).write_bytes(bz2.compress((HEADER + "".join(pages) + end).encode()))


def convert(*flags, prefix="wiki"):
    spec = importlib.util.spec_from_file_location("wikipedia_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt"]
    module.main(["--dump", NAME, "--output-prefix", prefix, *tokenizer, *flags])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_dump_becomes_articles_and_token_files(folder, capsys):
    convert()
    articles = read(folder / "wiki.articles.jsonl")
    assert articles[0] == {
        "id": "1",
        "revid": "1001",
        "url": "https://de.wikipedia.org/wiki?curid=1",
        "title": "Title 1",
        "text": "The first & only.",
    }
    assert [article["id"] for article in articles] == ["1", "5", *map(str, range(7, 30))]
    assert len(IndexedDataset("wiki_text_document").document_starts) - 1 == NUM_ARTICLES
    report = json.loads((folder / "wiki.corpus.json").read_text())
    assert report["source"] == {
        "dump": NAME,
        "bytes": (folder / NAME).stat().st_size,
        "date": "2026-01-01",
        "site": "dewiki",
        "url": "https://de.wikipedia.org/wiki/Hauptseite",
        "licence": "CC BY-SA 4.0; https://dumps.wikimedia.org/legal.html",
    }
    assert report["pages"] == {
        "pages": 29,
        "redirects": 1,
        "other namespaces": 1,
        "not wikitext": 1,
        "articles": NUM_ARTICLES,
        "without text": 1,
    }
    (tokens,) = report["token_files"]
    assert (tokens["prefix"], tokens["documents"]) == ("wiki_text_document", NUM_ARTICLES)
    assert f"articles: {NUM_ARTICLES}" in capsys.readouterr().out


def test_tags_of_a_dump_may_share_lines(folder):
    convert(prefix="lines")
    write_dump(folder, [re.sub(r">\s+<", "><", "".join(PAGES))])
    convert()
    written = [(folder / f"{name}.articles.jsonl").read_bytes() for name in ("lines", "wiki")]
    assert written[0] == written[1]


def test_sentences_for_bert(folder):
    convert("--split-sentences")
    dataset = IndexedDataset("wiki_text_sentence")
    assert len(dataset.document_starts) - 1 == NUM_ARTICLES
    assert len(dataset.sizes) == 2 + 2 * 23


def test_a_killed_extraction_continues(folder, monkeypatch):
    convert(prefix="calm")
    monkeypatch.setattr(wikipedia, "_BATCH_CHARACTERS", 40)
    Markup.fails_at = "Article 16 "
    assert status_of_fork(convert) == signal.SIGKILL
    partial = folder / "wiki.articles.jsonl.partial"
    assert 5 < len(partial.read_text().splitlines()) - 1 < NUM_ARTICLES
    with partial.open("a") as file:
        file.write('{"id": "1')
    Markup.fails_at = "Article 8 "  # which is not parsed again
    convert()
    assert (folder / "wiki.articles.jsonl").read_bytes() == (
        folder / "calm.articles.jsonl"
    ).read_bytes()
    reports = [
        json.loads((folder / f"{name}.corpus.json").read_text()) for name in ("calm", "wiki")
    ]
    assert reports[0]["pages"] == reports[1]["pages"]


def test_articles_that_are_complete_are_kept_and_those_of_another_dump_refused(folder):
    convert()
    written = (folder / "wiki.articles.jsonl").stat().st_mtime_ns
    convert("--append-eod")
    assert (folder / "wiki.articles.jsonl").stat().st_mtime_ns == written
    write_dump(folder, PAGES[:10])
    with problem("wiki.articles.jsonl … remove it"):
        convert()


@pytest.mark.parametrize(
    ("pages", "end", "reported"),
    [
        (PAGES[1:4], "</mediawiki>", "no article … redirects: 1 … dump"),
        ((), "</mediawiki>", "no article … no page"),
        (PAGES, "", "incomplete … no element"),
        (PAGES, "</page>", "incomplete … mismatched tag"),
    ],
)
def test_a_dump_without_articles_or_its_end_is_an_error(folder, pages, end, reported):
    write_dump(folder, pages, end=end)
    with problem(reported, DataError):
        convert()
    assert not (folder / "wiki.articles.jsonl").exists()
    assert not (folder / "wiki_text_document.bin").exists()


def test_what_is_no_dump_is_reported(folder):
    (folder / NAME).write_bytes(bz2.compress(HEADER.encode())[:50])
    with problem(f"{NAME} … incomplete", DataError):
        convert()
    (folder / NAME).write_text("<html></html>")
    with problem("dump … <html>", DataError):
        convert()
    (folder / NAME).unlink()
    with problem(f"cannot read {NAME}", DataError):
        convert()
    with problem("--input … --dump"):
        convert("--input", "x")


def test_a_missing_parser_is_named(folder, modules):
    modules("mwparserfromhell")
    with problem("pip install mwparserfromhell"):
        convert()


MARKUP = """{{Infobox|name=Homarus}}
'''Homarus''' is a [[genus]] of [[lobster|large lobsters]].<ref>Smith {{cite|x}}</ref> It weighs
{{convert|5|kg}} or more.
[[Datei:Lob.jpg|mini|A caption with a [[link]]]]
== History ==
* item ''one''
{| class="wikitable"
|-
| cell<ref>In a table.</ref> || other
|}
<gallery>
File:a.jpg|caption
</gallery><!-- hidden -->


It was schÃ¶n&nbsp;there, see [[:Kategorie:Lobsters]] and [http://example.org a page].
[[Kategorie:Lobsters]]
[[en:Lobster]]
"""


def test_markup_becomes_text():
    pytest.importorskip("mwparserfromhell")
    hidden = frozenset({"datei", "file", "kategorie", "category"})
    assert wikipedia.plain_text(MARKUP, hidden) == (
        "Homarus is a genus of large lobsters. It weighs\nor more.\n\nHistory\nitem one\n\n"
        "It was schön there, see :Kategorie:Lobsters and a page."
    )
