"""Which URLs are dropped, and for what reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.extensions.corpora.cleaning.urls import (
    blacklisted_domains,
    blacklisted_extensions,
    digest,
    reason_against,
)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.io/",
        "https://news.example.co.uk/2019/story.html?id=1.jpg",
        "http://192.168.1.10:8080/page",
        "http://[2001:db8::1]/page",
        "http://localhost/page",
        "http://пример.рф/страница",
        "https://my_blog.example.com",
        "https://company.ai/about",  # a domain is no extension
        "http://notamazon.com/page",
        "http://amazon.example.com/page",  # the registered domain counts
    ],
)
def test_pages_are_kept(url):
    assert reason_against(url) is None


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://a", "too short"),
        ("example.com/page", "malformed"),
        ("ftp://example.com/page", "malformed"),
        ("http://example/page", "malformed"),
        ("http://-example.com/page", "malformed"),
        ("http://exam ple.com/page", "malformed"),
        ("http://example.com:99999/", "malformed"),
        ("http://1.2.3.4567/page", "malformed"),
        ("http://[::1/page", "malformed"),
        ("http://www.amazon.co.uk/book", "blacklisted domain"),
        ("https://youtu.be/abcdef", "blacklisted domain"),
        ("https://OLD.REDDIT.com/r/x", "blacklisted domain"),
        ("http://example.com/file.PDF", "blacklisted extension"),
        ("http://example.com/file.pdf?page=2#top", "blacklisted extension"),
    ],
)
def test_what_is_no_page_is_dropped(url, reason):
    assert reason_against(url) == reason


@pytest.mark.parametrize("extension", [".7z", ".ai"])
def test_extensions_are_distinguished(extension):
    assert extension in blacklisted_extensions()
    assert reason_against(f"http://example.com/file{extension}") == "blacklisted extension"
    assert reason_against("http://example.com/file.7z.ai.html") is None


def test_the_lists_are_clean():
    assert len(blacklisted_domains()) > 100
    assert all(name == name.lower() and "." not in name for name in blacklisted_domains())
    assert all(name == name.lower() and name.startswith(".") for name in blacklisted_extensions())


@given(st.text())
def test_any_text_has_an_answer(text):
    reason_against(text)
    reason_against("http://" + text)
    assert digest(text) == digest(text) != digest(text + "x")
