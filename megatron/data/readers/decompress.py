"""Compressed files as pieces of text, recognised by their first bytes; a cut-off end is an error."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from megatron.common.errors import DataError, needed_for

START_BYTES = 8
"""Number of bytes at the start of a file that identify its compression."""

_PIECE_BYTES = 1 << 18
_ZSTD_READ_BYTES = 1 << 14  # small, since its decompressed size has no bound
_ZSTD_WINDOW_BYTES = 1 << 31  # the most that zstd --long=31 writes
_MAGICS = {
    "gzip": [b"\x1f\x8b"],
    # Frames that hold no text may come first; pzstd writes them.
    "zstd": [b"\x28\xb5\x2f\xfd", *(bytes([i]) + b"\x2a\x4d\x18" for i in range(0x50, 0x60))],
    "xz": [b"\xfd7zXZ\x00", b"\x5d\x00\x00"],  # the latter is .lzma, its predecessor
    "bzip2": [b"BZh"],
}
_UNPACK = "unpack it, or pipe what it holds to --input -"
_UNREADABLE = {
    b"PK\x03\x04": f"a ZIP archive; {_UNPACK}",
    b"7z\xbc\xaf\x27\x1c": f"a 7-Zip archive; {_UNPACK}",
    b"\x04\x22\x4d\x18": f"an LZ4 file; {_UNPACK}",
    **dict.fromkeys(
        (b"\xff\xfe", b"\xfe\xff", b"{\x00", b"\x00{"),
        "text in UTF-16 or UTF-32; write it in UTF-8, for example with iconv -f UTF-16 -t UTF-8",
    ),
}


class UnreadableFormatError(DataError):
    """A file holds something else than lines of text. The message omits the file name."""


def compression_of(start: bytes) -> str | None:
    """Return "gzip", "zstd", "xz" or "bzip2" for a file that starts like this, None for text.

    Raises:
        UnreadableFormatError: it is something else.
    """
    for magic, name in _UNREADABLE.items():
        if start.startswith(magic):
            raise UnreadableFormatError(name)
    for compression, magics in _MAGICS.items():
        if start.startswith(tuple(magics)):
            return compression
    return None


def decompress(file: BinaryIO) -> Iterator[bytes]:
    """Yield the text of `file`, which may be compressed or not.

    Raises:
        EOFError: the file ends too early.
        ValueError: the file is damaged.
        UnreadableFormatError: it holds something else than text.
    """
    buffered: Any = file
    compression = compression_of(buffered.peek(START_BYTES)[:START_BYTES])
    if compression == "zstd":
        yield from _zstd(buffered)
        return
    text: Any = buffered
    if compression == "gzip":
        text = gzip.GzipFile(fileobj=buffered)
    elif compression == "xz":
        text = lzma.LZMAFile(buffered)  # noqa: SIM115  (the caller closes the file)
    elif compression == "bzip2":
        text = bz2.BZ2File(buffered)
    try:
        while piece := text.read1(_PIECE_BYTES):
            yield piece
    except (zlib.error, lzma.LZMAError) as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        if error.errno is not None:  # an error of the disk, not of gzip or bzip2
            raise
        raise ValueError(str(error)) from error


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    with needed_for("reading .zst files", "zstandard"):
        import zstandard
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
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
