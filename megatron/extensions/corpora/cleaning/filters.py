"""Filters of documents by name: this project's filters, and quality filters of datatrove."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from megatron.extensions.corpora.cleaning.records import TEXT_KEY, Line, to_bytes
from megatron.extensions.corpora.cleaning.repair import (
    TASKS,
    CleanDocuments,
    Outcome,
    RunTasks,
    piece_counter,
)

Filter = Callable[[Sequence[Line]], list[Outcome]]

DATATROVE = {
    "c4_paragraphs": "C4ParagraphFilter",
    "c4_quality": "C4QualityFilter",
    "fineweb_quality": "FineWebQualityFilter",
    "gopher_quality": "GopherQualityFilter",
    "gopher_repetition": "GopherRepetitionFilter",
}
NAMES = ("cleanup_dataset", *TASKS, *DATATROVE)


def build_filter(name: str) -> Filter:
    """Return the filter of this name, one of NAMES."""
    if name == "cleanup_dataset":
        return CleanDocuments(piece_counter)
    if name in TASKS:
        return RunTasks((name,))
    return DatatroveFilter(name)


def filter_problems(names: Sequence[str]) -> Iterator[str]:
    """Yield a message for each filter that does not exist or whose packages are missing."""
    for name in names:
        if name not in NAMES:
            yield f"--filters {name}: no such filter; choose from {', '.join(NAMES)}"
        elif name in DATATROVE:
            try:
                DatatroveFilter(name)([Line("", 1, 0, to_bytes({TEXT_KEY: "A text."}))])
            except ImportError as error:
                yield f"--filters {name} needs packages: pip install datatrove ({error})"


@dataclass(frozen=True)
class DatatroveFilter:
    """A filter of datatrove, which drops a document or changes its text."""

    name: str

    @cached_property
    def _filter(self) -> Any:
        from datatrove.pipeline import filters

        return getattr(filters, DATATROVE[self.name])()

    def __call__(self, batch: Sequence[Line]) -> list[Outcome]:
        """Return the outcome of each line."""
        return [self._outcome(line) for line in batch]

    def _outcome(self, line: Line) -> Outcome:
        from datatrove.data import Document

        record = line.record()
        text = line.text(record, TEXT_KEY)
        document = Document(text=text, id=line.location)
        is_kept = self._filter.filter(document)
        if is_kept is not True:  # False, or False and the reason
            return Outcome(line.raw, self.name, ())
        if document.text == text:
            return Outcome(line.raw, None, ())
        return Outcome(to_bytes({**record, TEXT_KEY: document.text}), None, (self.name,))


def filter_factories(names: Sequence[str]) -> dict[str, Callable[[], Filter]]:
    """Return the builder of each filter, for worker processes."""
    return {name: partial(build_filter, name) for name in names}
