"""Speed of preprocessing, beside Hugging Face's tokenizers on the same texts in the same run.

Both encode the same texts by turns in this process; figures are by CPU time, start-up apart. Then
tools/preprocess_data.py runs on 8 MB as a process of its own, start-up included. The texts are
made up: words of a Zipf distribution, some of them never seen before.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from megatron import log
from megatron.data.conversion import Conversion
from megatron.data.preprocess import preprocess
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.tool import run_tool

TOOL = Path(__file__).resolve().parents[1] / "preprocess_data.py"
WORDS_PER_DOCUMENT = {"mixed": 800, "short": 40, "long": 170_000}


def main(argv: Sequence[str]) -> None:
    """Make the texts, measure, and print one line for each kind of text."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=20, help="size of each file of texts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument(
        "--vocab-file", help="GPT-2's vocab.json; a small one is made when not said"
    )
    parser.add_argument("--merge-file", help="GPT-2's merges.txt")
    parser.add_argument("--jsonl", help="a file of texts to measure on, besides those made up")
    said = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    log.configure(rank=0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        files = {kind: make_texts(directory, kind, said.mb) for kind in WORDS_PER_DOCUMENT}
        if said.jsonl:
            files["given"] = Path(said.jsonl)
        vocab, merges = said.vocab_file, said.merge_file
        if not (vocab and merges):
            vocab, merges = make_vocabulary(directory, files["mixed"])
        wishes = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": vocab, "merge_file": merges}
        fast = build_tokenizer(**wishes)
        peer = ByteLevelBPETokenizer(vocab, merges)
        for kind, file in files.items():
            print(compare(kind, file, fast, peer, said.rounds, directory), flush=True)
        print(whole_process(directory, vocab, merges, said.rounds))


def make_texts(directory: Path, kind: str, megabytes: int) -> Path:
    """Write a file of JSON lines."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    shares = np.arange(26, 0, -1) / sum(range(27))
    lengths = random.integers(1, 11, 50_000)
    vocabulary = ["".join(random.choice(letters, n, p=shares)) for n in lengths]
    path = directory / f"{kind}.jsonl"
    with path.open("w") as file:
        while file.tell() < megabytes * 1_000_000:
            count = int(random.integers(1, 2 * WORDS_PER_DOCUMENT[kind]))
            ranks = np.minimum(random.zipf(1.2, count), 50_000) - 1
            words = [vocabulary[rank] for rank in ranks]
            for i in range(0, count, 50):  # two percent that nobody has seen before
                words[i] = "".join(random.choice(letters, 7)).capitalize()
            file.write(json.dumps({"text": " ".join(words), "id": count}) + "\n")
    return path


def make_vocabulary(directory: Path, file: Path) -> tuple[str, str]:
    """Train a small byte-level BPE."""
    texts = [json.loads(line)["text"] for line in file.open()][:2000]
    tokenizer = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(texts, 16_000, special_tokens=special, show_progress=False)
    tokenizer.save_model(str(directory))
    return str(directory / "vocab.json"), str(directory / "merges.txt")


def compare(
    kind: str,
    file: Path,
    tokenizer: Tokenizer,
    peer: ByteLevelBPETokenizer,
    rounds: int,
    directory: Path,
) -> str:
    """Return a line with both speeds and their ratio."""
    texts = [json.loads(line)["text"] for line in file.open()]
    part = texts[: max(len(texts) // 10, 1)]  # the peer is slow; a tenth tells its speed
    megabytes = file.stat().st_size / 1e6
    part_megabytes = sum(map(len, part)) / 1e6
    conversion = Conversion(
        inputs=(str(file),),
        output_prefix=str(directory / "out"),
        make_encoder=lambda: tokenizer,
        append_eod=True,
        log_interval=10**9,
    )
    sides: dict[str, tuple[float, Callable[[], object]]] = {
        "ours": (megabytes, lambda: preprocess(conversion)),
        "tokenizer alone": (megabytes, lambda: tokenizer.encode_array(texts)),
        "encode_batch": (part_megabytes, lambda: peer.encode_batch(part)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, (size, work) in sides.items():
            started_at = time.process_time()
            work()
            if turn:  # the first turn warms up
                speeds[name].append(size / (time.process_time() - started_at))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return (
        f"{kind}: ours: {medians['ours']:.1f} MB/CPU-s | "
        f"tokenizer alone: {medians['tokenizer alone']:.1f} | "
        f"encode_batch of tokenizers: {medians['encode_batch']:.2f} | "
        f"of encode_batch: {medians['ours'] / medians['encode_batch']:.1f} | "
        f"of the tokenizer alone: {medians['ours'] / medians['tokenizer alone']:.2f}"
    )


def whole_process(directory: Path, vocab: str, merges: str, rounds: int) -> str:
    """Return a line with the CPU time of the tool on 8 MB."""
    file = make_texts(directory, "mixed", 8)
    command = [sys.executable, str(TOOL), "--input", str(file)]
    command += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    command += ["--vocab-file", vocab, "--merge-file", merges]
    command += ["--output-prefix", str(directory / "whole")]
    found = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"whole process, 8 MB: {statistics.median(found):.2f} CPU s"


if __name__ == "__main__":
    run_tool(main)
