"""Files at URLs (object storage): the directory of their local copies."""

from dataclasses import dataclass
from pathlib import Path

from megatron.config.parsing.declaration import setting
from megatron.config.parsing.parser import Given


@dataclass(frozen=True, kw_only=True)
class UrlConfig:
    """Files at URLs: local copies."""

    object_storage_cache_path: str | None = setting(None, older=("--s3-cache-path",))
    """Directory of local copies of what flags name by URL, such as s3://bucket/prefix: parts of token
    files, checkpoints, and outputs until they are uploaded (default: ~/.cache/megatron/urls)."""


def urls_in(given: Given) -> UrlConfig:
    """Return the flags about URLs among the options of a command line."""
    path = given.get("object_storage_cache_path") or given.get("s3_cache_path")
    return UrlConfig(object_storage_cache_path=path)


def cache_of(urls: UrlConfig) -> Path:
    """Return the directory of local copies."""
    path = urls.object_storage_cache_path
    return Path(path).expanduser() if path else Path.home() / ".cache" / "megatron" / "urls"
