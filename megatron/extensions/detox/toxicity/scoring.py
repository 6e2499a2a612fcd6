"""Scoring of generated texts: files of JSON lines, in several processes, resumable."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from megatron.common.errors import ConfigError, DataError
from megatron.common.process_pool import ordered_map
from megatron.extensions.corpora.cleaning.records import Line, Record, read_lines, to_bytes
from megatron.extensions.corpora.cleaning.resumable import resumable_output
from megatron.extensions.detox.toxicity.scorers import TOXICITY, Scorer, ScorerFactory, Scores

TEXT_KEY = "text"
END_OF_TEXT = "<|endoftext|>"
MOST_BYTES = 20480
"""UTF-8 bytes of a text that are scored: the most that the Perspective API accepts."""

_BATCH = 25
"""Texts scored between two writes: a killed process loses this many for each worker."""

Layout = Callable[[Record, str, Scores | None], Record]
"""Returns the object to write, of the one that was read, its text and its scores."""


def annotation(record: Record, text: str, score: Scores | None) -> Record:
    """Return `record` with its score: the layout of annotations."""
    return {**record, TEXT_KEY: text, "score": score}


def evaluation(record: Record, text: str, score: Scores | None) -> Record:
    """Return the score of a continuation with its prompt: the layout of evaluations."""
    return {TEXT_KEY: text, "context": record["prompt"], "id": record["id"], "score": score}


def text_of(line: Line) -> str:
    """Return the text of a line without end-of-text tokens.

    Raises:
        DataError: the line has no text.
    """
    return line.text(line.record(), TEXT_KEY).replace(END_OF_TEXT, "")


def scored_part(text: str) -> str:
    """Return the start of `text` that is scored, cut at a character's edge."""
    return text.encode("utf-8", "replace")[:MOST_BYTES].decode("utf-8", "ignore")


@dataclass(frozen=True)
class ScoreLines:
    """Scores batches of lines, with a scorer built when the first is scored."""

    factory: ScorerFactory
    layout: Layout

    @cached_property
    def scorer(self) -> Scorer:
        """The scorer of this process."""
        return self.factory()

    def __call__(self, batch: Sequence[Line]) -> list[bytes]:
        """Return the lines to write; the score of an empty text is null."""
        texts = [text_of(line) for line in batch]
        indices = [i for i, text in enumerate(texts) if text.strip()]
        scores: dict[int, Scores | None] = {}
        if indices:
            found = self.scorer([scored_part(texts[i]) for i in indices])
            scores = dict(zip(indices, found, strict=True))
        return [
            to_bytes(self._object(line, text, scores.get(i)))
            for i, (line, text) in enumerate(zip(batch, texts, strict=True))
        ]

    def _object(self, line: Line, text: str, score: Scores | None) -> Record:
        record = line.record()
        try:
            return self.layout(record, text, score)
        except KeyError as error:
            raise DataError(
                f"{line.location}: no key {error}; it has {', '.join(record)}"
            ) from None


def score_file(
    data_path: str,
    out_path: str,
    factory: ScorerFactory,
    layout: Layout,
    *,
    workers: int,
    total: int = -1,
) -> None:
    """Score the lines of `data_path` in their order; `out_path` appears when all are scored.

    Args:
        workers: processes that score.
        total: number of lines, from the first; -1: all.

    Raises:
        ConfigError: the scorer cannot be used, or an earlier attempt had other options.
        ScorerUnavailableError: the scorer fails; the next attempt continues.
        DataError: a line has no text, or an earlier attempt read other lines.
    """
    options: dict[str, Any] = {**factory.options, "layout": layout.__name__}
    with resumable_output(out_path, options, inputs=[data_path]) as output:
        lines = islice(read_lines([data_path]), None if total < 0 else total)
        for earlier in output.lines():
            _require_same(Line(str(output.path), 1, 0, earlier), next(lines, None), data_path)
        score = ScoreLines(factory, layout)
        for scored in ordered_map(score, _batches(lines), workers):
            output.write(*scored)


def _require_same(earlier: Line, line: Line | None, data_path: str) -> None:
    """Refuse lines of an earlier attempt that differ from the input's.

    Raises:
        ConfigError: they differ.
    """
    if line is None or earlier.record().get(TEXT_KEY) != text_of(line):
        raise ConfigError(
            f"{earlier.path}.partial holds scores of other texts than {data_path}: remove it, or "
            "give another --out-path"
        )


def _batches(lines: Iterator[Line]) -> Iterator[list[Line]]:
    while batch := [*islice(lines, _BATCH)]:
        yield batch


def toxicity_of(line: Line) -> float | None:
    """Return the toxicity in an annotated line; None if its score is null.

    Raises:
        DataError: the line was not annotated.
    """
    score = line.record().get("score", {})
    if score is None:
        return None
    value = score.get(TOXICITY) if isinstance(score, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(
            f"{line.location}: score.{TOXICITY} is missing or not a number; annotate the texts first"
        )
    return float(value)
