"""The hash of a file: which algorithms there are, and which one is written.

It finds what disks and networks damage, not what somebody forges: who can write the files can
write the manifest with their hashes, too.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import xxhash

_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
_WRITTEN = "xxh3_128"  # at the speed of memory on one core

_BLOCK = 1 << 20  # bytes: what has just been hashed, or read, is still in the core's cache


class FileHash:
    """The hash of bytes that come one after the other.

    Args:
        algorithm: one that `algorithm_of` returns.
    """

    def __init__(self, algorithm: str = _WRITTEN):
        self._algorithm = algorithm
        self._digest = _ALGORITHMS[algorithm]()

    def update(self, block: memoryview) -> None:
        """Take the next bytes."""
        self._digest.update(block)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def hash_of(stream: IO[bytes], algorithm: str = _WRITTEN) -> str:
    """Return the hash of what an unbuffered `stream` holds from here on."""
    found, memory = FileHash(algorithm), memoryview(bytearray(_BLOCK))
    # Not mapped: an error of the disk would end the process instead of being raised here.
    while size := stream.readinto(memory):  # type: ignore[attr-defined]
        found.update(memory[:size])
    return str(found)


def algorithm_of(told: str) -> str:
    """Return which algorithm made a hash.

    Raises:
        ValueError: it is not known here.
    """
    algorithm, _, _ = told.partition(":")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"a hash of {algorithm!r}, and known are {', '.join(_ALGORITHMS)}")
    return algorithm


def blocks(view: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of `view` in blocks that are best hashed and passed on one by one."""
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]
