"""Compressed files as pieces of text, recognised by their first bytes; a cut-off end is an error."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from megatron.errors import DataError

MAGICS = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00"}
"""First bytes of a file of each compression."""

_PIECE_BYTES = 1 << 18
_ZSTD_READ_BYTES = 1 << 14  # small, since what it becomes has no bound of its own


def decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Yield the text of `file`, which may be compressed or not.

    Raises:
        EOFError: the file ends too early.
        ValueError: the file is damaged.
    """
    buffered: Any = file
    magic = buffered.peek(8)[:8]
    if magic.startswith(MAGICS["zstd"]):
        yield from _zstd(buffered)
        return
    text: Any = buffered
    if magic.startswith(MAGICS["gzip"]):
        text = gzip.GzipFile(fileobj=buffered)
    elif magic.startswith(MAGICS["xz"]):
        text = lzma.LZMAFile(buffered)  # noqa: SIM115  (the caller closes the file)
    try:
        while piece := text.read1(_PIECE_BYTES):
            yield piece
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(str(error)) from error


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("to read .zst files, install zstandard: pip install zstandard") from error
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    while data := file.read(_ZSTD_READ_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                piece = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from error
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
            if piece:
                yield piece
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")
