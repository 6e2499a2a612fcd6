#!/usr/bin/env python
"""Measure the cleaning of a corpus by its size: documents per CPU-second and memory of each step.

Documents are synthetic and a fifth of them near duplicates. Prints a table in Markdown.
"""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import MegatronError
from megatron.data.preprocessing.command import read_flags
from megatron.extensions.corpora.cleaning.filters import filter_factories
from megatron.extensions.corpora.corpus.executors import Executor
from megatron.extensions.corpora.corpus.spec import CorpusSpec
from megatron.extensions.corpora.corpus.steps import Step, corpus_steps, make_folders

_ORIGINALS = 1000  # documents that copies are made of
_COPIES = 0.2
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "that",
    "by",
    "with",
    "as",
    "at",
    "from",
    "this",
    "be",
    "are",
    "an",
    "it",
    "not",
    "have",
    "one",
    "all",
    "will",
    "there",
    "which",
    "you",
    "were",
    "their",
    "been",
    "has",
    "when",
    "who",
    "more",
    "if",
    "out",
    "so",
    "up",
    "said",
    "what",
    "about",
    "into",
    "than",
    "them",
    "can",
    "only",
    "other",
    "new",
    "some",
    "could",
    "time",
    "these",
    "two",
    "may",
    "then",
    "do",
    "first",
    "any",
    "my",
    "now",
    "such",
    "like",
    "our",
    "over",
    "me",
    "even",
    "most",
    "made",
    "after",
    "also",
    "did",
    "many",
    "must",
    "before",
    "back",
    "see",
    "through",
    "way",
    "where",
]


@dataclass(frozen=True)
class Cost:
    """Resources that a step used."""

    cpu_s: float
    peak_mb: int
    """Of the process that used most."""


def main(argv: Sequence[str]) -> None:
    """Measure by the flags `argv`."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tasks", type=int, default=4, help="tasks of each step")
    parser.add_argument("--words", type=int, default=60, help="mean length of a document")
    parser.add_argument("--filters", nargs="*", default=["ftfy_fix_text"])
    args = parser.parse_args(argv)
    print("| documents | workers | step | CPU s | documents per CPU-second | peak MB |")
    print("|---|---|---|---|---|---|")
    for num_documents in args.documents:
        for workers in args.workers:
            costs = []
            for name, cost in measure(num_documents, workers, args):
                print_row(num_documents, workers, name, cost)
                costs.append(cost)
            cpu_s = sum(cost.cpu_s for cost in costs)
            print_row(num_documents, workers, "all", Cost(cpu_s, max(c.peak_mb for c in costs)))


def print_row(num_documents: int, workers: int, name: str, cost: Cost) -> None:
    """Print the cost of a step."""
    rate = f"{num_documents / max(cost.cpu_s, 1e-9):.0f}"
    row = (num_documents, workers, name, f"{cost.cpu_s:.1f}", rate, cost.peak_mb)
    print(f"| {' | '.join(map(str, row))} |", flush=True)


def measure(
    num_documents: int, workers: int, args: argparse.Namespace
) -> Iterator[tuple[str, Cost]]:
    """Yield the name and cost of each step for a corpus of this size."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "raw.jsonl")
        with source.open("w", encoding="utf-8") as file:
            for number, text in enumerate(texts(num_documents, args.words)):
                file.write(json.dumps({"url": str(number), "text": text}) + "\n")
        spec = CorpusSpec(
            inputs=(str(source),),
            folder=Path(folder, "cleaning"),
            tasks=args.tasks,
            filters=filter_factories(args.filters),
        )
        make_folders(spec)
        flags = ["--input", str(source), "--output-prefix", f"{folder}/corpus"]
        flags += ["--tokenizer-type", "GPT2BPETokenizer", *byte_vocabulary(Path(folder))]
        tokens = read_flags([*flags, "--append-eod"], description="").spec
        steps = corpus_steps(spec, tokens)
        executor = Executor(name="local", folder=spec.folder, workers=workers)
        for step in steps:
            yield step.name, cost_of(step, executor)


def cost_of(step: Step, executor: Executor) -> Cost:
    """Return the cost of a step, run in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            executor.run([step])
            # Of the workers; this process is measured by its parent.
            os.write(writer, str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    _, status, used = os.wait4(pid, 0)
    with os.fdopen(reader) as file:
        of_workers = file.read()
    if status:
        raise MegatronError(f"step {step.name} failed")
    peak_kb = max(used.ru_maxrss, int(of_workers))
    return Cost(used.ru_utime + used.ru_stime, peak_kb >> 10)


def texts(num_documents: int, words: int) -> Iterator[str]:
    """Yield synthetic texts, a fifth of which are near copies of earlier ones."""
    rng = random.Random(0)
    vocabulary = [f"{one}{other}" for one in _WORDS for other in ("", *_WORDS)]
    originals: list[str] = []
    for _ in range(num_documents):
        if originals and rng.random() < _COPIES:
            yield f"{rng.choice(originals)} {rng.choice(vocabulary)}"
            continue
        text = " ".join(rng.choices(vocabulary, k=rng.randint(words // 2, words * 3 // 2)))
        if len(originals) < _ORIGINALS:
            originals.append(text)
        yield text


def byte_vocabulary(folder: Path) -> list[str]:
    """Write a vocabulary of bytes without merges; return the flags that name it."""
    from tokenizers import pre_tokenizers

    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    names = json.dumps({token: index for index, token in enumerate(vocabulary)})
    (folder / "vocab.json").write_text(names, encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]


if __name__ == "__main__":
    run_tool(main)
