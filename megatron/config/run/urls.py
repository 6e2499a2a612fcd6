"""Files at URLs (object storage): the directory of their local copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.parsing.declaration import setting
from megatron.config.parsing.parser import value_in


@dataclass(frozen=True, kw_only=True)
class UrlConfig:
    """Files at URLs: local copies."""

    object_storage_cache_path: str | None = setting(None, older=("--s3-cache-path",))
    """Directory of local copies of what flags name by URL, such as s3://bucket/prefix: parts of token
    files, checkpoints, and outputs until they are uploaded (default: ~/.cache/megatron/urls)."""


def urls_in(argv: Sequence[str]) -> UrlConfig:
    """Return the flags about URLs in a command line, without parsing the rest."""
    names = ("--object-storage-cache-path", "--s3-cache-path")
    paths = [path for name in names if (path := value_in(argv, name))]
    return UrlConfig(object_storage_cache_path=paths[0] if paths else None)


def cache_of(urls: UrlConfig) -> Path:
    """Return the directory of local copies."""
    path = urls.object_storage_cache_path
    return Path(path).expanduser() if path else Path.home() / ".cache" / "megatron" / "urls"
