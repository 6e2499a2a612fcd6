"""Texts of the evaluations that training data must not contain."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.common.errors import ConfigError, DataError
from megatron.extensions.corpora.cleaning.records import Line, Record, read_lines


@dataclass(frozen=True)
class Evaluation:
    """Location of the text of an evaluation.

    Args:
        key: of the text in a record.
        dataset: name on the Hugging Face hub, and the name of its part if it has several; None if
            there is only a file.
        split: which examples are evaluated.
    """

    key: str
    dataset: tuple[str, ...] | None
    split: str


EVALUATIONS = {
    "lambada": Evaluation("text", None, "test"),
    "squad": Evaluation("question", ("rajpurkar/squad_v2",), "validation"),
    "natural_questions": Evaluation(
        "question", ("google-research-datasets/natural_questions",), "validation"
    ),
    "triviaqa": Evaluation("question", ("mandarjoshi/trivia_qa", "unfiltered"), "test"),
    "webqa": Evaluation("question", ("stanfordnlp/web_questions",), "test"),
    "race": Evaluation("article", ("ehovy/race", "all"), "test"),
    "drop": Evaluation("passage", ("ucinlp/drop",), "validation"),
    "coqa": Evaluation("story", ("stanfordnlp/coqa",), "validation"),
    "piqa": Evaluation("goal", ("ybisk/piqa",), "test"),
}


def evaluation_texts(task: str, path: str | None) -> Iterator[str]:
    """Yield the texts of an evaluation, from a file of JSON lines or else from the hub.

    Raises:
        ConfigError: there is no file, and no library to get the data set with.
        DataError: a record has no text.
    """
    evaluation = EVALUATIONS[task]
    if path is not None:
        for line in read_lines([path]):
            yield _text(line, line.record(), evaluation.key)
        return
    if evaluation.dataset is None:
        raise ConfigError(f"--tasks {task} needs --{task}-path, a file of JSON lines")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"--tasks {task} needs a file, --task-files {task} FILE, with one object a line whose "
            f"key {evaluation.key!r} holds the text; or the package `datasets`"
        ) from error
    rows = load_dataset(*evaluation.dataset, split=evaluation.split, streaming=True)
    for number, row in enumerate(rows, start=1):
        yield _text(Line(evaluation.dataset[0], number, 0, b""), row, evaluation.key)


def _text(line: Line, record: Record, key: str) -> str:
    """Return the text under `key`, which some data sets keep in a nested object."""
    value = record.get(key)
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    if not isinstance(value, str):
        raise DataError(f"{line.location}: no text under key {key!r}; it has {', '.join(record)}")
    return value
