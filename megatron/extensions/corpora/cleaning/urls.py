"""URL filter: the URLs that are worth downloading as text."""

import ipaddress
import re
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from megatron.common.errors import needed_for

REASONS = ("too short", "malformed", "blacklisted domain", "blacklisted extension")

_MIN_LENGTH = 9
_LABEL = re.compile(r"(?!-)[\w-]{1,63}(?<!-)")
_SPACE = re.compile(r"[\s\x00-\x1f\x7f]")


@cache
def _split_domain() -> Any:
    with needed_for("the blacklist of domains", "tldextract"):
        from tldextract import TLDExtract
    # With the list of suffixes that comes with it: nothing is fetched, nothing is kept on disk.
    return TLDExtract(suffix_list_urls=(), cache_dir=None)


def reason_against(url: str) -> str | None:
    """Return why not to download `url`, one of REASONS, or None."""
    if len(url) < _MIN_LENGTH:
        return "too short"
    parts = _split_url(url)
    if parts is None:
        return "malformed"
    if _split_domain().extract_urllib(parts).domain.lower() in blacklisted_domains():
        return "blacklisted domain"
    if parts.path.lower().endswith(tuple(blacklisted_extensions())):
        return "blacklisted extension"
    return None


def digest(url: str) -> int:
    """Return a 64-bit hash of `url`."""
    raw = url.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


@cache
def blacklisted_domains() -> frozenset[str]:
    """Return names of registered domains without their suffix: `amazon` is also amazon.co.uk."""
    return frozenset(_words("blacklisted_domains.txt"))


@cache
def blacklisted_extensions() -> frozenset[str]:
    """Return the file extensions of URLs that are no web pages."""
    return frozenset(_words("blacklisted_extensions.txt"))


def _words(name: str) -> list[str]:
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [word for line in lines for word in line.partition("#")[0].split()]


def _split_url(url: str) -> SplitResult | None:
    """Return the parts of a well-formed http or https URL, None of any other."""
    if _SPACE.search(url):
        return None
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return None
    return parts if is_web and _is_host(parts.hostname or "") else None


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        labels = host.removesuffix(".").split(".")
        is_named = host == "localhost" or (len(labels) > 1 and not labels[-1].isdigit())
        return is_named and all(_LABEL.fullmatch(label) for label in labels)
