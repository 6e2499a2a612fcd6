"""Files at URLs (object storage): the directory of their local copies."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class UrlConfig:
    """Files at URLs: local copies."""

    object_storage_cache_path: Annotated[
        str | None, Spelling("--object-storage-cache-path", ("--s3-cache-path",))
    ] = None
    """Directory of local copies of what flags name by URL, such as s3://bucket/prefix: parts of token
    files, checkpoints, and outputs until they are uploaded (default: ~/.cache/megatron/urls)."""


def cache_of(urls: UrlConfig) -> Path:
    """Return the directory of local copies."""
    path = urls.object_storage_cache_path
    return Path(path).expanduser() if path else Path.home() / ".cache" / "megatron" / "urls"
