"""Files of MNLI, RACE, words and answers whose labels a small network finds out, and their vocabulary."""

import json
import random
from pathlib import Path

CLASSES = ("contradiction", "entailment", "neutral")
WORDS = [f"w{i}" for i in range(40)]


def write_vocabulary(file: Path) -> None:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "_", ".", "?", "what")
    file.write_text("\n".join([*special, *WORDS]) + "\n")


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


def write_tagged(file: Path, count: int, *, seed: int = 0) -> None:
    """Write sentences of four words; the first twelve words are persons and places."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        numbers = draw.choices(range(24), k=4)
        lines += [f"{WORDS[i]} {'B-PER' if i < 6 else 'B-LOC' if i < 12 else 'O'}" for i in numbers]
        lines.append("")
    file.write_text("\n".join(lines) + "\n")


def write_squad(file: Path, count: int, *, seed: int = 0) -> None:
    """Write questions whose answer is the only one of the first eight words in the context."""
    draw = random.Random(seed)
    paragraphs = []
    for i in range(count):
        words = draw.choices(WORDS[8:], k=6)
        words[draw.randrange(6)] = answer = draw.choice(WORDS[:8])
        context = " ".join(words)
        start = f" {context} ".index(f" {answer} ")
        question = {"id": f"q{i}", "question": "what"}
        question["answers"] = [{"text": answer, "answer_start": start}]
        paragraphs.append({"context": context, "qas": [question]})
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
