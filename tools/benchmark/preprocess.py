"""Speed of preprocessing, beside the ways of others to tokenize the same file in the same run.

All sides take turns in this process, and the first turn counts for nothing:

- gigatoken encode_files: the library reads the file and returns the tokens, which nobody writes.
- gigatoken in batches: lines parsed by orjson, encoded 10 000 documents at a time on this thread,
  EODs added and the tokens written.
- encode_batch: `tokenizers` on texts that are parsed already; no file is read or written.
- a loop over documents: parse, encode with `tokenizers`, add EOD, append to a file; what one
  worker of Megatron-LM's preprocess_data.py does.

The last two are slow, so they get the first 4 MB of the file. Then come tokenizers that the fast
library does not know, on a fifth as much text, beside `encode_batch` on all cores; and at last
tools/preprocess_data.py on 8 MB as a process of its own, start-up included. The texts are made up:
words of a Zipf distribution, some of them never seen before.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import awkward as ak
import gigatoken
import numpy as np
import orjson
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, SentencePieceUnigramTokenizer
from tokenizers import Tokenizer as HuggingFaceTokenizer

from megatron.data.conversion import Conversion
from megatron.data.preprocess import preprocess
from megatron.tokenizer.build import build_tokenizer
from megatron.tool import run_tool

TOOL = Path(__file__).resolve().parents[1] / "preprocess_data.py"
BATCH = 10_000  # documents, of the peer that works in batches
SLOW_BYTES = 4_000_000  # of the file, for the slow peers
WORDS_PER_DOCUMENT = {"mixed": 800, "short": 40, "long": 170_000}


def main(argv: Sequence[str]) -> None:
    """Make the texts, measure, and print one line for each kind of text."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100, help="size of each file of texts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument(
        "--vocab-file", help="GPT-2's vocab.json; a small one is made when not said"
    )
    parser.add_argument("--merge-file", help="GPT-2's merges.txt")
    parser.add_argument("--jsonl", help="a file of texts to measure on, besides those made up")
    said = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        files = {kind: make_texts(directory, kind, said.mb) for kind in WORDS_PER_DOCUMENT}
        if said.jsonl:
            files["given"] = directory / "given.jsonl"  # so that outputs go elsewhere
            files["given"].symlink_to(Path(said.jsonl).resolve())
        vocab, merges = said.vocab_file, said.merge_file
        if not (vocab and merges):
            vocab, merges = make_vocabulary(directory, files["mixed"])
        for kind, file in files.items():
            print(compare(kind, file, vocab, merges, said.rounds), flush=True)
        fifth = make_texts(directory, "mixed", max(said.mb // 5, 1))
        for kind in ("WordPiece", "Unigram"):
            print(compare_other(kind, fifth, said.rounds), flush=True)
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


def compare(kind: str, file: Path, vocab: str, merges: str, rounds: int) -> str:
    """Return a line with the speed of each side, and ours as a multiple of the others."""
    reference = ByteLevelBPETokenizer(vocab, merges)
    fast = gigatoken.Tokenizer.from_json(reference._tokenizer.to_str())
    eod = reference.token_to_id("<|endoftext|>")
    texts = [json.loads(line)["text"] for line in file.open()]
    lines = file.read_bytes().splitlines()
    lines = lines[: max(len(lines) * SLOW_BYTES // file.stat().st_size, 1)]
    part = texts[: len(lines)]
    source = gigatoken.JsonlFileSource([str(file)], "text")
    of_gpt2 = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": vocab, "merge_file": merges}
    conversion = wishes(file, of_gpt2)
    ours = build_tokenizer(**of_gpt2)
    conversion = replace(conversion, make_encoder=lambda: ours)
    whole, share = file.stat().st_size, sum(map(len, lines))
    found = by_turns(
        {
            "ours": (whole, lambda: preprocess(conversion)),
            "gigatoken encode_files": (whole, lambda: fast.encode_files(source, parallel=False)),
            "gigatoken in batches": (whole, lambda: write_batches(file, fast, eod)),
            "encode_batch": (share, lambda: reference.encode_batch(part)),
            "a loop over documents": (share, lambda: write_in_a_loop(lines, reference, eod, file)),
        },
        rounds,
    )
    return f"{kind}: {described(found, of='CPU')}"


def compare_other(kind: str, file: Path, rounds: int) -> str:
    """Return a line on a tokenizer that the fast library does not know, by wall time."""
    texts = [json.loads(line)["text"] for line in file.open()]
    trained = SentencePieceUnigramTokenizer() if kind == "Unigram" else BertWordPieceTokenizer()
    special = ["<unk>", "</s>"] if kind == "Unigram" else ["[UNK]", "[CLS]", "[SEP]"]
    more = {"unk_token": "<unk>"} if kind == "Unigram" else {}
    trained.train_from_iterator(
        texts[:2000], 16_000, special_tokens=special, show_progress=False, **more
    )
    directory = file.with_name(kind)
    directory.mkdir()
    trained.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[-1]}))
    asked = {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": str(directory)}
    conversion = wishes(file, asked)
    raw = HuggingFaceTokenizer.from_file(str(directory / "tokenizer.json"))
    cores = len(os.sched_getaffinity(0))
    size = file.stat().st_size
    found = by_turns(
        {
            "ours": (size, lambda: preprocess(conversion)),
            f"{cores} workers": (size, lambda: preprocess(replace(conversion, workers=cores))),
            "encode_batch on all cores": (size, lambda: raw.encode_batch(texts)),
        },
        rounds,
    )
    return f"{kind}: {described(found, of='wall')}"


def wishes(file: Path, of_tokenizer: Mapping[str, Any]) -> Conversion:
    """Return the conversion of `file` by one process."""
    return Conversion(
        inputs=(str(file),),
        output_prefix=str(file.with_name("out")),
        make_encoder=partial(build_tokenizer, **of_tokenizer),
        append_eod=True,
        log_interval=10**9,
    )


def write_batches(file: Path, tokenizer: gigatoken.Tokenizer, eod: int) -> None:
    """Tokenize `file` in batches, with an awkward array for each."""
    with file.open("rb") as lines, file.with_name("batches.bin").open("wb") as bin_file:
        sizes = []
        while batch := [orjson.loads(line)["text"] for line in islice(lines, BATCH)]:
            tokens = tokenizer.encode_batch(batch, parallel=False)
            ends = ak.Array(np.full((len(batch), 1), eod, np.uint32))
            tokens = ak.concatenate([tokens, ends], axis=1)
            sizes.append(ak.to_numpy(ak.num(tokens)))
            bin_file.write(ak.to_numpy(ak.flatten(tokens)).astype(np.uint16).tobytes())
        np.save(file.with_name("batches.npy"), np.concatenate(sizes))


def write_in_a_loop(
    lines: Sequence[bytes], tokenizer: ByteLevelBPETokenizer, eod: int, file: Path
) -> None:
    """Tokenize one line after the other."""
    sizes = []
    with file.with_name("loop.bin").open("wb") as bin_file:
        for line in lines:
            tokens = tokenizer.encode(json.loads(line)["text"]).ids
            tokens.append(eod)
            sizes.append(len(tokens))
            bin_file.write(np.array(tokens, dtype=np.uint16).tobytes(order="C"))
    np.save(file.with_name("loop.npy"), sizes)


def by_turns(
    sides: Mapping[str, tuple[int, Callable[[], object]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Return the best speeds of each side, in MB a second by CPU and by wall time.

    The best, since whatever else runs on the machine only takes from them.
    """
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, (num_bytes, work) in sides.items():
            cpu_s, started_at = cpu_time(), time.monotonic()
            work()
            wall_s, cpu_s = time.monotonic() - started_at, cpu_time() - cpu_s
            if turn:  # the first turn warms up
                speeds[name].append((num_bytes / cpu_s / 1e6, num_bytes / wall_s / 1e6))
    best = {name: map(max, zip(*of, strict=True)) for name, of in speeds.items()}
    return {name: dict(zip(("CPU", "wall"), of, strict=True)) for name, of in best.items()}


def cpu_time() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def described(found: Mapping[str, Mapping[str, float]], *, of: str) -> str:
    """Return the speeds in words, and the first as a multiple of each by CPU or wall time."""
    return " | ".join(
        f"{name}: {one['CPU']:.1f} MB/CPU-s, {one['wall']:.1f} MB/s"
        + f" (ours: {found['ours'][of] / one[of]:.2f} x)" * (name != "ours")
        for name, one in found.items()
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
    return f"whole process, 8 MB: {min(found):.2f} CPU s"


if __name__ == "__main__":
    run_tool(main)
