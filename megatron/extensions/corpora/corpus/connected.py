"""Connected components of similar pairs by passes over sorted files: the first document of each group.

Source: Kiveris et al., Connected Components in MapReduce and Beyond, 2014 (large-star, small-star).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.extensions.corpora.cleaning.external_sort import (
    ExternalSorter,
    unique_blocks,
    with_firsts,
)

# Pairs by their second document: many copies of one document then lie in the files of many tasks.
BY_OTHER = np.dtype([("other", "<u8"), ("main", "<u8")])


def first_documents(pairs: Iterable[NDArray], folder: Path, **sizes: int) -> Iterator[NDArray]:
    """Yield each document of a connected group but the first, sorted, with the first as its main.

    Passes go on until each document is linked to the first of its group alone. Their number grows
    with the logarithm of the length of the chains of pairs; memory is that of an external sort.

    Args:
        pairs: records of BY_OTHER in any order, main before other.
        folder: for temporary files.
        sizes: see `ExternalSorter`.
    """
    with TemporaryFile(dir=folder) as one, TemporaryFile(dir=folder) as other:
        links = _sort(pairs, one, sizes)
        while True:
            passes = _Passes()
            links = _sort(passes.to_earlier(links), other, sizes)
            links = _sort(passes.to_later(links), one, sizes)
            if not passes.has_changed:
                break
        yield from links


class _Passes:
    """Passes over links, which are pairs sorted by `other`; they replace each link by one nearer."""

    has_changed = False

    def to_earlier(self, links: Iterable[NDArray]) -> Iterator[NDArray]:
        """Link the earlier neighbors of each document to the first of them; yield both directions."""
        for records, firsts in with_firsts(links):
            is_first = records["main"] == firsts["main"]
            self.has_changed |= not is_first.all()
            linked = np.where(is_first, records["other"], records["main"])
            yield _links(linked, firsts["main"])
            yield _links(firsts["main"], linked)

    def to_later(self, links: Iterable[NDArray]) -> Iterator[NDArray]:
        """Link the later neighbors of each document to the first neighbor, or else to it.

        Args:
            links: in both directions.
        """
        for records, firsts in with_firsts(links):
            is_later = records["main"] > records["other"]
            later, first = records[is_later], firsts["main"][is_later]
            self.has_changed |= bool((first < later["other"]).any())
            yield _links(later["main"], np.minimum(first, later["other"]))


def _links(other: NDArray, main: NDArray) -> NDArray:
    links = np.zeros(len(other), BY_OTHER)
    links["other"], links["main"] = other, main
    return links


def _sort(links: Iterable[NDArray], scratch: BinaryIO, sizes: dict[str, Any]) -> Iterator[NDArray]:
    """Return the links sorted, each once, by way of a file whose content is no longer needed."""
    scratch.seek(0)
    scratch.truncate()
    sorter = ExternalSorter(scratch, BY_OTHER, **sizes)
    for block in links:
        sorter.add(block)
    return unique_blocks(sorter.blocks())
