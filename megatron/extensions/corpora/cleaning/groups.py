"""Groups of duplicate documents, by name, and the files they are kept in."""

from collections.abc import Iterator

from megatron.common.errors import DataError
from megatron.extensions.corpora.cleaning.records import Line, Record, read_lines


class Groups:
    """Names that belong together: a union-find that remembers in which order they came."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def join(self, one: str, other: str) -> None:
        """Put two names, and all that belong to either, into one group."""
        first, second = self._root(one), self._root(other)
        self._parent[second] = first

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the groups, and the names in each, in the order in which they first came."""
        groups: dict[str, list[str]] = {}
        for name in list(self._parent):
            groups.setdefault(self._root(name), []).append(name)
        yield from groups.values()

    def _root(self, name: str) -> str:
        path = []
        while (parent := self._parent.setdefault(name, name)) != name:
            path.append(name)
            name = parent
        for passed in path:
            self._parent[passed] = name
        return name


def read_pairs(path: str) -> Iterator[tuple[str, str, float]]:
    """Yield main, other and similarity of each pair of a file of `find_duplicates.py`.

    Raises:
        DataError: a line is not {main: [{other: similarity}, ...]}.
    """
    for line in read_lines([path]):
        for main, others in line.record().items():
            if not isinstance(others, list):
                raise _unexpected_line(line, '{"main": [{"other": 0.9}]}')
            for similarities in others:
                yield from _pairs_of(line, main, similarities)


def read_groups(path: str) -> Iterator[list[str]]:
    """Yield each group of a file of `group_duplicate_url.py`.

    Raises:
        DataError: a line is not {index: [name, ...]}.
    """
    for line in read_lines([path]):
        for names in line.record().values():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise _unexpected_line(line, '{"0": ["main", "other"]}')
            yield names


def _pairs_of(line: Line, main: str, similarities: Record) -> Iterator[tuple[str, str, float]]:
    if not isinstance(similarities, dict):
        raise _unexpected_line(line, '{"main": [{"other": 0.9}]}')
    for other, similarity in similarities.items():
        if isinstance(similarity, bool) or not isinstance(similarity, int | float):
            raise _unexpected_line(line, '{"main": [{"other": 0.9}]}')
        yield main, other, similarity


def _unexpected_line(line: Line, example: str) -> DataError:
    return DataError(f"{line.location}: {line.excerpt!r} is not of the form {example}")
