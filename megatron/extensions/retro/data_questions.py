"""Questions with answers and contexts (InstructRetro): JSON files, prompts, tokens of a sample."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.common.errors import WrongDataError, near, reason
from megatron.extensions.tasks.data.squad_scores import answer_f1, exact_match
from megatron.tokenizer.types.tokenizer import Tokenizer

_SYSTEM = (
    "System: This is a chat between a user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions{}.\n\n"
)
_FROM_CONTEXT = (
    " based on the context. The assistant should also indicate when the answer cannot be found in the "
    "context"
)

_CONVERSATIONS = frozenset({"oasst", "open_inst", "quiet_cockatoo", "quiet-cockatoo_commercial"})
_DIALOGUES = frozenset({"doc2dial", "quac", "qrecc", "sharc"})
_SHORT = frozenset(
    {
        "drop",
        "narrativeqa",
        "qasc",
        "quoref",
        "ropes",
        "squad1.1",
        "squad2.0",
        "newsqa",
        "nq",
        "tqa",
    }
)
_YES_NO = frozenset({"boolq"})

_RETRIEVED = ("ctxs", "bert_pretrain_corpus_neighbours")


_EMPTY = "title: , source: "


@dataclass(frozen=True)
class QAItem:
    """A question, its right answers, and its contexts in their order."""

    question: str
    answers: tuple[str, ...]
    contexts: tuple[str, ...]


def read_qa_items(
    file: Path, *, is_retrieved: bool, is_longform: bool = False, needs_answers: bool = True
) -> list[QAItem]:
    """Read the questions of a file: a JSON list, or JSON lines of long answers.

    Args:
        is_retrieved: contexts are those that were retrieved, rather than the question's paragraphs.
        needs_answers: skip questions without an answer.

    Raises:
        WrongDataError: the file cannot be read, is malformed or has no question.
    """
    items = []
    for number, entry in enumerate(_entries(file, is_longform=is_longform), start=1):
        try:
            item = _item(entry, is_retrieved=is_retrieved, is_longform=is_longform)
        except ValueError as error:
            raise WrongDataError(f"{file}, entry {number}: {error}") from error
        if item.answers or not needs_answers:
            items.append(item)
    if not items:
        raise WrongDataError(f"{file} has no question{' with an answer' * needs_answers}")
    return items


def _entries(file: Path, *, is_longform: bool) -> Iterator[Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if is_longform:
            entries = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            entries = json.loads(text)
    except OSError as error:
        raise WrongDataError(f"cannot read {file}: {reason(error, file)}{near(file)}") from error
    except ValueError as error:
        form = "JSON lines (--longform-answer)" if is_longform else "JSON"
        raise WrongDataError(f"{file} is not {form}: {error}") from error
    if not isinstance(entries, list):
        raise WrongDataError(f"{file} must hold a JSON list of questions")
    yield from entries


def _item(entry: Any, *, is_retrieved: bool, is_longform: bool) -> QAItem:
    """Return the question of a JSON object.

    Raises:
        ValueError: it is malformed.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get("question"), str):
        raise ValueError("it must be an object with a text under question")
    question = entry["question"]
    if entry.get("qa_type") == "multi_choice_qa":
        options = entry.get("multichoice_options")
        if not isinstance(options, list) or not options:
            raise ValueError("a question of qa_type multi_choice_qa needs multichoice_options")
        choices = " ".join(f"({chr(ord('A') + i)}) {option}" for i, option in enumerate(options))
        question += f"\nChoose one based on the following options: {choices}"
    key = "longform_answer" if is_longform else "answers" if "answers" in entry else "answer"
    return QAItem(question, tuple(_answers(entry.get(key))), tuple(_contexts(entry, is_retrieved)))


def _answers(found: Any) -> Iterator[str]:
    """Yield the texts of the answers, without empty ones."""
    for answer in found if isinstance(found, list) else [found]:
        text = answer.get("text") if isinstance(answer, Mapping) else answer
        if isinstance(text, (str, int, float)) and str(text).strip():
            yield str(text).strip()


def _contexts(entry: Mapping[str, Any], is_retrieved: bool) -> Iterator[str]:
    """Yield the contexts of a question with their titles; an empty one if it has none.

    Raises:
        ValueError: those that are needed are missing or malformed.
    """
    if is_retrieved:
        key = next((key for key in _RETRIEVED if key in entry), None)
        if key is None:
            raise ValueError(
                f"it has neither {' nor '.join(_RETRIEVED)} (--use-retrieved-neighbours)"
            )
        found = entry[key]
    else:
        key = "sub-paragraphs" if "sub-paragraphs" in entry else "sub_paragraph"
        found = [entry.get(key, "")]
    if not isinstance(found, list):
        raise ValueError(f"{key} must be a list of contexts")
    for context in found or [""]:
        title, text = "", context
        if isinstance(context, Mapping):
            title, text = context.get("title", ""), context.get("text")
        elif isinstance(context, list) and len(context) == 2:
            title, text = context
        if not isinstance(text, str) or not isinstance(title, str):
            raise ValueError(f"{key} must hold texts with or without a title")
        yield f"title: {title}, source: {text}"


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The form of prompts, and their tokens.

    A prompt is a system line, contexts and the turn of the user. Names of question sets decide the
    turn: whether the answer is a short phrase, True or False, or a text; questions of dialogues have
    a turn's form already, and questions of conversations have no contexts either.

    Args:
        name: of the question set.
        num_contexts: in a prompt.
        retrieves: whether the network is a Retro, whose system line says nothing of the context.
        is_short: the form "Question: ... Answer: The answer is", without a system line.
    """

    tokenizer: Tokenizer
    name: str
    num_contexts: int
    retrieves: bool
    is_short: bool = False

    def tokens(self, item: QAItem, room: int) -> list[int]:
        """Return the tokens of a prompt; contexts are cut from the right to leave at most `room`."""
        parts = self.parts(item)
        tokens = self.tokenizer.encode("".join(parts))
        if len(tokens) <= room:
            return tokens
        before, contexts, turn = map(self.tokenizer.encode, parts)
        return [*before, *contexts[: max(0, room - len(before) - len(turn))], *turn]

    def parts(self, item: QAItem) -> tuple[str, str, str]:
        """Return the system line, the contexts and the turn of a prompt."""
        contexts = "".join(f"{each}\n\n" for each in item.contexts[: self.num_contexts])
        if self.is_short:
            return "", contexts, f"Question: {item.question} Answer: The answer is"
        system = _SYSTEM.format("" if self.retrieves else _FROM_CONTEXT)
        name = self.name.lower()
        if name in _CONVERSATIONS or name.startswith("oasst-"):
            return system, "", item.question
        if name in _DIALOGUES:
            return system, contexts, item.question
        form, start = "a long complete answer", ""
        if name in _SHORT:
            form, start = "a short phrase", " The answer is"
        elif name in _YES_NO:
            form = "True or False"
        question = f"{item.question} Answer the above question with {form}."
        return system, contexts, f"User: {question}\n\nAssistant:{start}"


def encoder_contexts(
    item: QAItem,
    tokenizer: Tokenizer,
    *,
    first: int,
    count: int,
    length: int,
) -> list[list[int]]:
    """Return the tokens of the `count` contexts from number `first` on, each cut to `length`.

    Empty contexts have none, and stand for those that are missing.
    """
    texts = item.contexts[first : first + count]
    found = [tokenizer.encode(text)[:length] if text != _EMPTY else [] for text in texts]
    return found + [[]] * (count - len(found))


def items_in_range(items: Sequence[QAItem], first: int, count: int | None) -> list[QAItem]:
    """Return `count` questions from number `first` on; all if None.

    Raises:
        WrongDataError: there are not so many.
    """
    stop = len(items) if count is None else first + count
    if not first < stop <= len(items):
        raise WrongDataError(
            f"--gen-start-idx {first}{'' if count is None else f' --num-gen {count}'}: there are "
            f"{len(items)} questions"
        )
    return [*items[first:stop]]


def question_set_of(file: str) -> str:
    """Return the name of the question set of a file: nq of nq_QA_dev.json, or of its folder."""
    path = Path(file)
    name, separator, _ = path.name.partition("_QA_")
    return name if separator else path.absolute().parent.name


def answer_scores(predictions: Sequence[str], items: Sequence[QAItem]) -> dict[str, float]:
    """Return the mean exact match and F1 of predicted answers.

    One normalization serves both. Exact match is with any of the answers, F1 with the first.

    Raises:
        ValueError: there is not one prediction for each question.
    """
    pairs = [*zip(predictions, items, strict=True)]
    exact = [exact_match(text, item.answers) for text, item in pairs]
    f1 = [answer_f1(text, item.answers[:1]) for text, item in pairs]
    return {"exact_match": sum(exact) / len(pairs), "f1": sum(f1) / len(pairs)}
