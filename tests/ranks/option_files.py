"""The files that turned options name: token files, vocabularies, settings."""

import base64
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sentence_corpora import write_sentences, write_vocabulary
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<split>", "<other>"]
NULL_EOD = 60


def write_files(folder: Path) -> None:
    """Write them all, the same each time."""
    draw = random.Random(0)
    for name in ("corpus", "other"):
        lengths = [draw.randint(3, 30) for _ in range(200)]
        write_tokens(
            folder / name, ([*draw.choices(range(NULL_EOD), k=n), NULL_EOD] for n in lengths)
        )
    _write_gpt2(folder, draw)
    _write_tiktoken(folder, draw)
    for name, length in (("hf", 300), ("hf_longer", 400)):
        _write_hugging_face(folder / name, length)
    _write_json(
        folder / "curriculum.json",
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 16,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 2, "difficulty_step": 8},
            }
        },
    )
    write_vocabulary(folder / "bert.txt")
    write_sentences(folder / "sentences", [4] * 400, [*range(0, 401, 4)])
    for name, count in (("train.tsv", 10), ("dev.tsv", 7)):
        _write_qnli(folder / name, count)
    (folder / "words.conll").write_text(_TAGGED)
    lines = (f"w{6 + 3 * i} w9\t{i % 3}\n" for i in range(10))
    (folder / "classes.tsv").write_text("".join(lines))
    _write_squad(folder / "squad.json")
    _write_squad(folder / "squad2.json", is_impossible=True)
    _write_squad(folder / "long.json", num_words=12)
    (folder / "flags.yaml").write_text("adam-beta1: 0.5\n")
    (folder / "kill").touch()
    (folder / "paths.txt").write_text(f'"b: 1 0:1 {folder}/other"\n')


_TAGGED = "".join(f"w6w8 B-X\nw{7 + 3 * (i % 9)} O\nw9 {'OB'[i % 2]}\n\n" for i in range(12))
"""Sentences of words with labels; the first has two tokens."""


def _write_squad(file: Path, *, num_words: int = 2, is_impossible: bool = False) -> None:
    """Write questions whose contexts are longer than a sample.

    Args:
        num_words: of each answer.
        is_impossible: whether the first question has no answer.
    """
    words = [f"w{6 + 3 * i}" for i in range(12)]
    context = " ".join(words)
    questions: list[dict[str, Any]] = []
    for i in range(6):
        start = min(i, len(words) - num_words)
        text = " ".join(words[start : start + num_words])
        answers = [{"text": text, "answer_start": context.index(text)}]
        questions.append({"id": f"q{i}", "question": "w7 w9 w10", "answers": answers})
    if is_impossible:
        questions[0] |= {"answers": [], "is_impossible": True}
    paragraphs = [{"context": context, "qas": questions}]
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))


def _write_qnli(file: Path, count: int) -> None:
    """Write labelled pairs of texts, which depend on how many they are."""
    labels = ("entailment", "not_entailment")
    lines = [f"{i}\tw{5 + i}\tw{count} w7\t{labels[i % 2]}" for i in range(count)]
    file.write_text("\n".join(["index\tquestion\tsentence\tlabel", *lines]) + "\n")


def write_tokens(prefix: Path, documents: Iterable[list[int]]) -> None:
    """Write one pair of token files."""
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for document in documents:
            writer.append(document)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def _write_gpt2(folder: Path, draw: random.Random) -> None:
    """Byte-level BPE with one merge, and texts that were cut into letters all the same."""
    vocab = {token: i for i, token in enumerate([*LETTERS, *SPECIAL, "ab"])}
    _write_json(folder / "vocab.json", vocab)
    _write_json(folder / "longer.json", vocab | {f"more{i}": 263 + i for i in range(20)})
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "none.txt").write_text("#version: 0.2\n")
    parts = ["ab", "ab", "c", ["<split>"]]
    texts = [sum(map(list, draw.choices(parts, k=draw.randint(3, 15))), []) for _ in range(200)]
    write_tokens(
        folder / "text", ([vocab[c] for c in text] + [vocab["<|endoftext|>"]] for text in texts)
    )
    write_tokens(folder / "letters", [[vocab[c] for c in "ab" * 400]] * 9)
    for part in ("inputs", "targets"):
        words = [draw.choices("abc", k=draw.randint(1, 4)) for _ in range(100)]
        write_tokens(
            folder / f"tasks_{part}_document", ([vocab[c] for c in word] for word in words)
        )


def _write_tiktoken(folder: Path, draw: random.Random) -> None:
    """A file of ranks with one merge, of two digits, and texts of digits; 10 special tokens."""
    for name, texts in (("tiktoken", [b"12"]), ("tiktoken_other", [b"21"])):
        ranks = [*(bytes([i]) for i in range(256)), *texts]
        _write_json(
            folder / f"{name}.json",
            [
                {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
                for i, t in enumerate(ranks)
            ],
        )
    write_tokens(
        folder / "digits",
        (
            [10 + byte for byte in draw.choices(b"1212c", k=draw.randint(6, 30))] + [2]
            for _ in range(200)
        ),
    )


def _write_hugging_face(folder: Path, length: int) -> None:
    folder.mkdir()
    tokens = ["</s>", *LETTERS, *(f"more{i}" for i in range(length))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens[:length])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
    )
