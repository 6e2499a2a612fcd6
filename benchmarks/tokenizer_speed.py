#!/usr/bin/env python
"""Speed of the fast tokenizer backend beside `encode_batch` of Hugging Face's tokenizers.

Both take turns on the same texts in one process, and their ids are compared. Compare the ratio by
CPU time: wall time depends on the neighbours. Without files, it trains a small vocabulary on the
text it makes; with GPT-2's files, it measures GPT-2.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from tokenizers import ByteLevelBPETokenizer

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError, MegatronError
from megatron.tokenizer.types.fast import FastTokenizer
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer

SYLLABLES = [a + b for a in "bdfgklmnprstvw" for b in ("a", "e", "i", "o", "u", "er", "an", "is")]


def main(argv: Sequence[str]) -> None:
    """Print MB per CPU-second of both, for documents of three lengths."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--vocab-file", help="vocab.json of GPT-2")
    parser.add_argument("--merge-file", help="merges.txt of GPT-2")
    parser.add_argument("--megabytes", type=float, default=4.0, help="text of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    args = parser.parse_args(argv)
    if bool(args.vocab_file) != bool(args.merge_file):
        raise ConfigError("give both --vocab-file and --merge-file, or neither")
    if args.megabytes <= 0 or args.rounds < 1:
        raise ConfigError("--megabytes must be more than 0, and --rounds at least 1")
    with tempfile.TemporaryDirectory() as folder:
        files = args.vocab_file, args.merge_file
        reference = GPT2BPETokenizer(*(files if args.vocab_file else trained(Path(folder))))
    fast = FastTokenizer(reference, must_be_fast=True)
    for kind, mean_words in (("short", 30), ("mixed", 400), ("long", 100_000)):
        texts = documents(int(args.megabytes * 1e6), mean_words=mean_words)
        print(compared(kind, texts, reference, fast, args.rounds))


def trained(folder: Path) -> tuple[Path, Path]:
    """Return the two files of a vocabulary of 8192 tokens."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        documents(1_000_000, mean_words=400, seed=1),
        vocab_size=8192,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def documents(num_bytes: int, *, mean_words: int, seed: int = 0) -> list[str]:
    """Return texts of made-up words: most of them seen before, one in 50 never."""
    draw = random.Random(seed)
    known = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 3) for rank in range(len(known))]
    texts, total = [], 0
    while total < num_bytes:
        count = draw.randint(mean_words // 2, mean_words * 3 // 2)
        words = draw.choices(known, weights, k=count)
        for i in range(0, count, 50):
            words[i] = str(draw.random()) + "".join(draw.choices(SYLLABLES, k=5)) + ".\n"
        texts.append(" ".join(words))
        total += len(texts[-1])
    return texts


def compared(
    kind: str,
    texts: Sequence[str],
    reference: GPT2BPETokenizer,
    fast: FastTokenizer,
    rounds: int,
) -> str:
    """Return one line; `encode_array` of both must give the same ids."""
    ours, theirs = fast.encode_array(texts), reference.encode_array(texts)
    if not all((one == two).all() for one, two in zip(ours, theirs, strict=True)):
        raise MegatronError(f"{kind}: the ids of the two differ")
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    speeds: dict[str, list[float]] = {"fast": [], "hugging face": []}
    for _ in range(rounds):
        # A new one each time: what an earlier turn remembers of the words would flatter it.
        new = FastTokenizer(reference, must_be_fast=True)
        new.encode_array(["to import what is imported on use"])
        speeds["fast"].append(megabytes / cpu_seconds(lambda new=new: new.encode_array(texts)))
        speeds["hugging face"].append(
            megabytes / cpu_seconds(lambda: reference.backend.encode_batch(list(texts)))
        )
    fast_speed, other_speed = map(statistics.median, speeds.values())
    return (
        f"{kind}: {len(texts)} documents, {megabytes:.1f} MB, {ours[0].size} tokens | "
        f"fast: {fast_speed:.1f} MB/CPU-s | encode_batch: {other_speed:.2f} MB/CPU-s | "
        f"ratio: {fast_speed / other_speed:.1f}"
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the time that `work` takes on all cores together."""
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


if __name__ == "__main__":
    run_tool(main)
