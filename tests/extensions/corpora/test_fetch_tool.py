"""Web pages are fetched politely, once, and their texts written."""

import importlib.util
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.extensions.corpora.cleaning.web_pages import build_extractor

TOOL = Path(__file__).resolve().parents[3] / "tools" / "corpora" / "fetch.py"
PAGES = {
    "/robots.txt": (200, "text/plain", "User-agent: *\nDisallow: /private\n"),
    "/1": (200, "text/html; charset=utf-8", "<p>One.</p>"),
    "/2": (200, "text/html", "<p>Two.</p>"),
    "/private/3": (200, "text/html", "<p>Hidden.</p>"),
    "/file.pdf": (200, "application/pdf", "%PDF"),
    "/large": (200, "text/html", "x" * 5000),
    "/empty": (200, "text/html", ""),
    "/moved": (301, "text/html", "/2"),
    "/hidden": (302, "text/html", "/private/3"),
    "/away": (302, "text/html", "http://elsewhere.invalid/"),
    "/broken": (503, "text/html", ""),
}


class Site(BaseHTTPRequestHandler):
    """A site that counts the requests."""

    pages: dict
    requests: list

    def do_GET(self):
        self.requests.append((self.path, self.headers["User-Agent"]))
        code, kind, body = self.pages.get(self.path, (404, "text/html", ""))
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if code in (301, 302):
            self.send_header("Location", body)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        return


@pytest.fixture
def site(tmp_path, monkeypatch, modules):
    """A site on the loopback address; trafilatura is replaced by a function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def extract(page, url, **_):
        text = page.decode().removeprefix("<p>").removesuffix("</p>")
        return SimpleNamespace(title=None, date="2026-01-01", text=text)

    modules("trafilatura", bare_extraction=extract)
    handler = type("Handler", (Site,), {"pages": dict(PAGES), "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{server.server_address[1]}"
        yield SimpleNamespace(host=host, pages=handler.pages, requests=handler.requests)
        server.shutdown()


def fetch(*flags):
    spec = importlib.util.spec_from_file_location("fetch_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--urls", "urls.txt", "--pages", "pages.json", "--host-delay-s", "0", *flags])


def write_urls(*urls):
    Path("urls.txt").write_text("".join(f"{url}\n" for url in urls))


def read(name, key):
    records = [json.loads(line) for line in Path(name).read_text().splitlines()]
    return {record["url"].rpartition(":")[2].partition("/")[2]: record[key] for record in records}


def test_pages_are_fetched_and_the_others_listed(site, capsys):
    paths = [path for path in PAGES if path != "/robots.txt"]
    write_urls(*(site.host + path for path in [*paths, "/none", "/1"]), "file:///etc/passwd")
    fetch("--max-page-mb", "0.002", "--user-agent", "tester")
    assert read("pages.json", "text") == {"1": "One.", "2": "Two.", "moved": "Two."}
    assert read("pages.json.failures", "problem") == {
        "private/3": "robots.txt",
        "file.pdf": "a file of type application/pdf",
        "large": "too large",
        "empty": "no text",
        "hidden": "a redirect to what robots.txt forbids",
        "away": "a redirect to elsewhere.invalid",
        "broken": "HTTP 503",
        "none": "HTTP 404",
        "//etc/passwd": "no valid URL",
    }
    requested = [path for path, _ in site.requests]
    assert requested.count("/robots.txt") == requested.count("/1") == 1
    assert "/private/3" not in requested
    assert {agent for _, agent in site.requests} == {"tester"}
    assert "pages.json: pages: 3 | failures: 9" in capsys.readouterr().out
    fetch()
    assert len(site.requests) == len(requested)
    assert "pages.json is there" in capsys.readouterr().out


def test_a_stopped_attempt_continues_and_tries_temporary_failures_again(site):
    write_urls(site.host + "/broken", site.host + "/none")
    with problem("2 URLs … urls.txt … text", DataError):
        fetch()
    site.pages["/broken"] = (200, "text/html", "<p>Mended.</p>")
    site.requests.clear()
    fetch()
    assert [path for path, _ in site.requests] == ["/robots.txt", "/broken"]
    assert read("pages.json", "text") == {"broken": "Mended."}
    assert read("pages.json.failures", "problem") == {"none": "HTTP 404"}


def test_a_host_that_does_not_answer_is_left_alone(site):
    site.pages["/robots.txt"] = (503, "text/plain", "")
    write_urls(site.host + "/1", site.host + "/2")
    with problem("URLs … text", DataError):
        fetch()
    assert [path for path, _ in site.requests] == ["/robots.txt"]


def test_wrong_flags_are_reported(site):
    write_urls(site.host + "/1")
    with problem("--host-delay-s -1.0 … 0 or more"):
        fetch("--host-delay-s", "-1")
    with problem("--threads 0 … more than 0"):
        fetch("--threads", "0")


def test_a_missing_extractor_is_named(modules):
    modules("trafilatura")
    with problem('pip install "trafilatura>=2"'):
        build_extractor()


def test_trafilatura_extracts_text_and_title():
    pytest.importorskip("trafilatura")
    text = "The river runs past the old mill and the bridge. " * 10
    page = f"<html><head><title>The old mill</title></head><body><nav>Menu</nav><article><p>{text}</p><p>{text[:90]} End.</p></article></body></html>"
    record = build_extractor()(page.encode(), "http://example.org/mill")
    assert record is not None
    assert (record["url"], record["title"]) == ("http://example.org/mill", "The old mill")
    assert record["text"].startswith("The river runs")
    assert "Menu" not in record["text"]
