"""Texts to measure tokenizers on: prose and source code, with words new to a tokenizer.

Made-up words of a small vocabulary would not do: a tokenizer that keeps what it knows about words
would find them all, and real text is full of names, numbers and misspellings.
"""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

CHARACTERS_PER_DOCUMENT = {"mixed": 4_500, "short": 230, "long": 1_000_000}
"""Mean sizes; a document has up to twice as many."""

_CODE_SHARE = 0.5
_NEW_WORDS = 0.02


class Texts:
    """Pieces of prose and of code, from which any number of documents is put together."""

    def __init__(self, prose_files: Sequence[str] = ()) -> None:
        """Read prose from files, or else the manual of the Python language; code is its library."""
        prose = [Path(file).read_text(encoding="utf-8") for file in prose_files] or topics.values()
        self._prose = [line for text in prose for line in text.splitlines() if line.strip()]
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = (file for file in sorted(library.rglob("*.py")) if "site-" not in str(file))
        codes = (file.read_text(encoding="utf-8", errors="ignore") for file in sources)
        self._code = [line for code in codes for line in code.splitlines() if line.strip()]
        self._letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))

    def write(self, path: Path, kind: str, megabytes: float, *, seed: int = 0) -> Path:
        """Write a file of JSON lines; of one seed they are always the same."""
        random = np.random.default_rng(seed)
        with path.open("w", encoding="utf-8") as file:
            while file.tell() < megabytes * 1_000_000:
                size = int(random.integers(1, 2 * CHARACTERS_PER_DOCUMENT[kind]))
                text = "\n".join(self._lines(random, size))[:size]
                file.write(json.dumps({"text": text, "id": size}) + "\n")
        return path

    def _lines(self, random: np.random.Generator, size: int) -> Iterator[str]:
        """Yield lines of `size` characters at least, of prose or of code."""
        lines = self._code if random.random() < _CODE_SHARE else self._prose
        at = random.integers(len(lines))
        while size > 0:
            words = lines[at % len(lines)].split(" ")
            for i in np.flatnonzero(random.random(len(words)) < _NEW_WORDS):
                words[i] = "".join(random.choice(self._letters, 7)).capitalize()
            yield (line := " ".join(words))
            size -= len(line)
            at += 1
