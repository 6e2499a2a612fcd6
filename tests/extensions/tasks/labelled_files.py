"""Files of downstream tasks whose labels a small network finds out, and text to pretrain it on."""

import json
import random
from pathlib import Path

from sentence_corpora import write_sentences

CLASSES = ("contradiction", "entailment", "neutral")
WORDS = [f"w{i}" for i in range(40)]
TOPICS = [range(first, first + 8) for first in range(0, 40, 8)]
"""Numbers of the words that are in the same sentences of the text to pretrain on."""

_OTHERS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "_", ".", "?", "what")


def write_vocabulary(file: Path) -> None:
    file.write_text("\n".join([*_OTHERS, *WORDS]) + "\n")


def write_topics(prefix: Path, count: int, *, seed: int = 0) -> None:
    """Write token files of documents of four sentences; all words of a document are of one topic."""
    draw = random.Random(seed)
    words = [draw.choices(draw.choice(TOPICS), k=16) for _ in range(count)]
    tokens = [len(_OTHERS) + number for document in words for number in document]
    write_sentences(prefix, [4] * 4 * count, [*range(0, 4 * count + 1, 4)], tokens)


def write_mnli(file: Path, count: int, *, seed: int = 0) -> None:
    """Write pairs of texts; the first word of the second is one of each class."""
    draw = random.Random(seed)
    lines = ["\t".join(f"column{i}" for i in range(12))]
    for i in range(count):
        label = draw.randrange(3)
        first = " ".join(draw.choices(WORDS[3:], k=3))
        second = " ".join([WORDS[label], *draw.choices(WORDS[3:], k=2)])
        lines.append("\t".join([str(i), *"1234567", first, second, "-", CLASSES[label]]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def write_sst2(file: Path, count: int, *, words: slice, seed: int = 0) -> None:
    """Write sentences of the words of one of two topics, which is their label.

    Args:
        words: of a topic that the file has: others mean nothing to a network that has only seen these.
    """
    draw = random.Random(seed)
    lines = ["sentence\tlabel"]
    for _ in range(count):
        label = draw.randrange(2)
        lines.append(
            " ".join(WORDS[i] for i in draw.choices(TOPICS[label][words], k=4)) + f"\t{label}"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def write_stsb(file: Path, count: int, *, seed: int = 0) -> None:
    """Write pairs of texts; the first word of the second is one of each score from 0 to 5."""
    draw = random.Random(seed)
    lines = ["\t".join(f"column{i}" for i in range(10))]
    for i in range(count):
        score = draw.randrange(6)
        first = " ".join(draw.choices(WORDS[6:], k=3))
        second = " ".join([WORDS[score], *draw.choices(WORDS[6:], k=2)])
        lines.append("\t".join([str(i), *"123456", first, second, f"{score:.3f}"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def write_race(folder: Path, count: int, *, seed: int = 0) -> None:
    """Write two files of questions in all; the right choice is one of the first eight words."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    questions = []
    for i in range(count):
        options, answer = draw.sample(WORDS[8:], 4), draw.randrange(4)
        options[answer] = draw.choice(WORDS[:8])
        text = ("what _ ?", "what ?")[i % 2]
        article = " ".join(draw.choices(WORDS[8:], k=5))
        questions.append((article, [text], [options], ["ABCD"[answer]]))
    keys = ("article", "questions", "options", "answers")
    for part in range(2):
        lines = (json.dumps(dict(zip(keys, each, strict=True))) for each in questions[part::2])
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n")


def write_relations(file: Path, count: int, *, seed: int = 0, words: slice = slice(8)) -> None:
    """Write marked sentences of three relations, by the topic of the word between the entities.

    Args:
        words: of each topic.
    """
    draw = random.Random(seed)
    lines = ["index\tsentence\tlabel"]
    for i in range(count):
        number = draw.randrange(3)
        sentence = f"_ {_word(draw, number, words)} _"
        lines.append(f"{i}\t{sentence}\t{('CPR:3', 'CPR:4', 'false')[number]}")
    file.write_text("\n".join(lines) + "\n")


def write_tagged(file: Path, count: int, *, seed: int = 0, words: slice = slice(8)) -> None:
    """Write sentences of four words; those of the first topic are persons, of the second places.

    Args:
        words: of each topic.
    """
    draw = random.Random(seed)
    kinds = ["B-PER", "B-LOC", "O", "O"]
    lines = []
    for _ in range(count):
        topics = draw.choices(range(4), k=4)
        lines += [f"{_word(draw, topic, words)} {kinds[topic]}" for topic in topics]
        lines.append("")
    file.write_text("\n".join(lines) + "\n")


def write_squad(file: Path, count: int, *, seed: int = 0, words: slice = slice(8)) -> None:
    """Write questions whose answer is the only word of the first topic in the context.

    Args:
        words: of each topic.
    """
    draw = random.Random(seed)
    paragraphs = []
    for i in range(count):
        texts = [_word(draw, draw.randrange(1, 5), words) for _ in range(6)]
        texts[draw.randrange(6)] = answer = _word(draw, 0, words)
        context = " ".join(texts)
        start = f" {context} ".index(f" {answer} ")
        question = {"id": f"q{i}", "question": "what"}
        question["answers"] = [{"text": answer, "answer_start": start}]
        paragraphs.append({"context": context, "qas": [question]})
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))


def _word(draw: random.Random, topic: int, words: slice) -> str:
    return WORDS[draw.choice(TOPICS[topic][words])]
