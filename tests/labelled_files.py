"""Files of MNLI and RACE whose labels a small network finds out, and their vocabulary."""

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
