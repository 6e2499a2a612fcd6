"""RACE: reading comprehension with four choices, read from folders of JSON lines."""

import json
from pathlib import Path
from typing import Any

from megatron.common.errors import WrongDataError, near
from megatron.extensions.tasks.data.packing import clean_text
from megatron.extensions.tasks.data.task import EXCERPT, read_lines, wrong_line
from megatron.extensions.tasks.data.task_dataset import ClassificationTask, Example, Examples

_LETTERS = ("A", "B", "C", "D")
_MAX_QUESTION_TOKENS = 128
_KEYS = {"article": str, "questions": list, "options": list, "answers": list}


def read_race(folder: Path) -> Examples:
    """Read the questions of all *.txt of a folder but hidden ones, in the order of their names.

    Each line is a JSON object with an article, its questions, their four options and the letters
    of the answers. Text A is the question with the option in place of each "_", or after it if
    there is none; text B is the article.

    Raises:
        WrongDataError: there is no such file, a line is malformed, or there is no question.
    """
    # macOS writes a ._1.txt of metadata next to each 1.txt on other file systems.
    files = sorted(path for path in folder.glob("*.txt") if not path.name.startswith("."))
    if not files:
        hint = "" if folder.is_dir() else f"{near(folder)}; it must be a folder"
        if subfolders := sorted(path.name for path in folder.glob("*/")):
            hint = (
                f"; it has the folders {', '.join(subfolders)}, each of which is a path of its own"
            )
        raise WrongDataError(f"{folder}: no *.txt of RACE{hint}")
    examples: list[Example] = []
    for path in files:
        for number, line in read_lines(path):
            try:
                examples += _questions(line, len(examples))
            except ValueError as error:
                raise wrong_line(path, number, f"{error} (a line of RACE)") from error
    if not examples:
        raise WrongDataError(f"{folder}: its {len(files)} *.txt have no question")
    return Examples(examples)


def _questions(line: str, first_uid: int) -> list[Example]:
    """Return the questions about one article."""
    article, questions, options, answers = _passage(line)
    if not (len(questions) == len(options) == len(answers)):
        raise ValueError(
            f"{len(questions)} questions, {len(options)} lists of options and {len(answers)} "
            "answers; there must be as many of each"
        )
    if not article.strip():
        raise ValueError("the article is empty")
    article = clean_text(article)
    examples = []
    for i, (question, choices, answer) in enumerate(zip(questions, options, answers, strict=True)):
        if not isinstance(choices, list) or len(choices) != len(_LETTERS):
            raise ValueError(f"question {i + 1} must have a list of {len(_LETTERS)} options")
        if not all(isinstance(text, str) for text in (question, *choices)):
            raise ValueError(f"question {i + 1} and its options must be strings")
        if answer not in _LETTERS:
            raise ValueError(f"answer {i + 1} is {answer!r}; it must be {', '.join(_LETTERS)}")
        firsts = tuple(
            clean_text(question.replace("_", choice) if "_" in question else f"{question} {choice}")
            for choice in choices
        )
        examples.append(Example(firsts, article, _LETTERS.index(answer), first_uid + i))
    return examples


def _passage(line: str) -> tuple[Any, ...]:
    try:
        passage = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "; each object must be on one line" if line.strip() in ("{", "[") else ""
        raise ValueError(f"not JSON: {line[:EXCERPT]!r} ({error}){hint}") from error
    if not isinstance(passage, dict):
        raise ValueError(f"not a JSON object: {line[:EXCERPT]!r}")
    for key, kind in _KEYS.items():
        if not isinstance(passage.get(key), kind):
            what = "text" if kind is str else "list"
            raise ValueError(f"key {key!r} is missing or not a {what}")
    return tuple(passage[key] for key in _KEYS)


RACE = ClassificationTask(
    name="RACE",
    classes=_LETTERS,
    metric_names=("accuracy",),
    read=read_race,
    num_choices=len(_LETTERS),
    max_first_tokens=_MAX_QUESTION_TOKENS,
)
"""RACE; an example is a question, which is four rows."""
