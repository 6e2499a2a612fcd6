#!/usr/bin/env python
"""Speed of preprocessing, beside the ways of others to tokenize the same file in the same run.

All sides take turns, each time as a new process whose tokenizer has seen another text before the
clock starts, as in the midst of a large corpus, but not this one; the first turn counts for nothing:

- gigatoken encode_files: the library reads the file and returns the tokens, which are not written.
- encode_files, written: the same, then an EOD is put behind each document, and tokens and index are
  written; what Megatron-LM's preprocess_data_fast.py does with a file, in numpy.
- encode_batch: `tokenizers` on texts that are parsed already; no file is read or written.
- a loop over documents: parse, call the tokenizer of `transformers`, add EOD, append to a file; what
  Megatron-LM's preprocess_data.py does, but for sending ids from its worker to the process that
  writes.

The last two are slow, so they get the first 4 MB of the file. Then come tokenizers that the fast
library does not know, on a fifth as much text, beside `encode_batch` on all cores; and at last
tools/preprocess_data.py on 8 MB as a process of its own, start-up included. sample_texts.py says
what the texts are.
"""

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import gigatoken
import numpy as np
from sample_texts import CHARACTERS_PER_DOCUMENT, Texts
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, SentencePieceUnigramTokenizer
from tokenizers import Tokenizer as HuggingFaceTokenizer

from megatron.common.cli import ToolParser, run_tool
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.null import NullTokenizer

if TYPE_CHECKING:
    from transformers import GPT2TokenizerFast

TOOL = Path(__file__).resolve().parents[1] / "tools" / "preprocess_data.py"
SLOW_BYTES = 4_000_000  # of the file, for the slow peers
FORK = multiprocessing.get_context("fork")
WARM_MB, SLOW_WARM_MB = 8, 1  # of another text

Result = TypeVar("Result")


def main(argv: Sequence[str]) -> None:
    """Make the texts, measure, and print one line for each kind of text."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100, help="size of each file of texts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--vocab-file", help="GPT-2's vocab.json; default: a small one is made")
    parser.add_argument("--merge-file", help="GPT-2's merges.txt")
    parser.add_argument(
        "--prose", nargs="*", default=(), help="plain text to put texts together from"
    )
    args = parser.parse_args(argv)
    # Where it is set, each process compiles this package's modules anew.
    os.unsetenv("PYTHONDONTWRITEBYTECODE")
    texts = Texts(args.prose)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        vocab, merges = args.vocab_file, args.merge_file
        if not (vocab and merges):
            file = texts.write(directory / "v.jsonl", "mixed", 8, seed=2)
            vocab, merges = in_a_process(partial(make_vocabulary, file))
        for kind in CHARACTERS_PER_DOCUMENT:
            file = texts.write(directory / f"{kind}.jsonl", kind, args.mb)
            before = texts.write(directory / f"{kind}-before.jsonl", kind, WARM_MB, seed=1)
            print(compare(kind, file, before, vocab, merges, args.rounds), flush=True)
            file.unlink()
        fifth = texts.write(directory / "fifth.jsonl", "mixed", max(args.mb // 5, 1))
        for kind in ("WordPiece", "Unigram"):
            print(compare_other(kind, fifth, args.rounds), flush=True)
        eight = texts.write(directory / "eight.jsonl", "mixed", 8)
        print(whole_process(eight, vocab, merges, args.rounds))


def make_vocabulary(file: Path) -> tuple[str, str]:
    """Train a small byte-level BPE."""
    texts = texts_of(file.read_bytes().splitlines())[:2000]
    tokenizer = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(texts, 16_000, special_tokens=special, show_progress=False)
    return tuple(tokenizer.save_model(str(file.parent)))


def compare(kind: str, file: Path, before: Path, vocab: str, merges: str, rounds: int) -> str:
    """Return a line with the speed of each side, and ours as a multiple of the others."""
    reference = ByteLevelBPETokenizer(vocab, merges)
    definition, eod = reference._tokenizer.to_str(), reference.token_to_id("<|endoftext|>")
    of_gpt2 = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": vocab, "merge_file": merges}
    lines, lines_before = first_lines(file, SLOW_BYTES), first_lines(before, SLOW_WARM_MB * 10**6)

    def ours() -> Callable[[], object]:
        tokenizer = build_tokenizer(**of_gpt2)
        first, then = (
            replace(spec_of(it), make_encoder=lambda: tokenizer) for it in (before, file)
        )
        preprocess(first)
        return lambda: preprocess(then)

    def encode_files() -> Callable[[], object]:
        fast = gigatoken.Tokenizer.from_json(definition)
        first, then = (gigatoken.JsonlFileSource([str(it)], "text") for it in (before, file))
        fast.encode_files(first, parallel=False)
        return lambda: fast.encode_files(then, parallel=False)

    def files_written() -> Callable[[], object]:
        fast = gigatoken.Tokenizer.from_json(definition)
        write_files(before, fast, eod)
        return lambda: write_files(file, fast, eod)

    def encode_batch() -> Callable[[], object]:
        slow = ByteLevelBPETokenizer(vocab, merges)
        slow.encode_batch(texts_of(lines_before))
        texts = texts_of(lines)
        return lambda: slow.encode_batch(texts)

    def in_a_loop() -> Callable[[], object]:
        from transformers import GPT2TokenizerFast  # seconds to import, for this side alone

        slow = GPT2TokenizerFast(vocab_file=vocab, merges_file=merges)
        write_in_a_loop(lines_before, slow, eod, before)
        return lambda: write_in_a_loop(lines, slow, eod, file)

    num_bytes, share = file.stat().st_size, sum(map(len, lines))
    found = by_turns(
        {
            "ours": (num_bytes, ours),
            "gigatoken encode_files": (num_bytes, encode_files),
            "encode_files, written": (num_bytes, files_written),
            "encode_batch": (share, encode_batch),
            "a loop over documents": (share, in_a_loop),
        },
        rounds,
    )
    return f"{kind}: {described(found, of='CPU')}"


def first_lines(file: Path, num_bytes: int) -> list[bytes]:
    """Return as many of the first lines of `file` as make about so many bytes, at least one."""
    lines = file.read_bytes().splitlines()
    return lines[: max(len(lines) * num_bytes // file.stat().st_size, 1)]


def texts_of(lines: Sequence[bytes]) -> list[str]:
    """Return the texts of JSON lines."""
    return [json.loads(line)["text"] for line in lines]


def compare_other(kind: str, file: Path, rounds: int) -> str:
    """Return a line on a tokenizer that the fast library does not know, by wall time."""
    special = ["<unk>", "</s>"] if kind == "Unigram" else ["[UNK]", "[CLS]", "[SEP]"]
    directory = in_a_process(partial(train_other, kind, file, special))
    tokenizer_options = {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": str(directory),
    }
    conversion = replace(spec_of(file), make_encoder=partial(build_tokenizer, **tokenizer_options))
    cores = len(os.sched_getaffinity(0))

    def encode_batch() -> Callable[[], object]:
        slow = HuggingFaceTokenizer.from_file(str(directory / "tokenizer.json"))
        texts = texts_of(file.read_bytes().splitlines())
        return lambda: slow.encode_batch(texts)

    many, size = replace(conversion, workers=cores), file.stat().st_size
    found = by_turns(
        {
            "ours": (size, lambda: partial(preprocess, conversion)),
            f"{cores} workers": (size, lambda: partial(preprocess, many)),
            "encode_batch on all cores": (size, encode_batch),
        },
        rounds,
    )
    return f"{kind}: {described(found, of='wall')}"


def train_other(kind: str, file: Path, special: Sequence[str]) -> Path:
    """Train a tokenizer, and return its folder."""
    texts = texts_of(file.read_bytes().splitlines())[:2000]
    trained = SentencePieceUnigramTokenizer() if kind == "Unigram" else BertWordPieceTokenizer()
    more = {"unk_token": "<unk>"} if kind == "Unigram" else {}
    trained.train_from_iterator(
        texts, 16_000, special_tokens=list(special), show_progress=False, **more
    )
    directory = file.with_name(kind)
    directory.mkdir()
    trained.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[-1]}))
    return directory


def spec_of(file: Path) -> PreprocessSpec:
    """Return the conversion of `file` by one process, but for its tokenizer."""
    return PreprocessSpec(
        inputs=(str(file),),
        output_prefix=str(file.with_name("out")),
        make_encoder=NullTokenizer,
        append_eod=True,
        log_interval=10**9,
    )


def write_files(file: Path, tokenizer: gigatoken.Tokenizer, eod: int) -> None:
    """Tokenize `file` with one call, put an EOD behind each document, write tokens and index."""
    source = gigatoken.JsonlFileSource([str(file)], "text")
    layout = tokenizer.encode_files(source, parallel=False).layout
    ends = np.asarray(layout.offsets.data, np.int64)
    tokens = np.asarray(layout.content.data)[ends[0] : ends[-1]].astype(np.uint16)
    np.insert(tokens, ends[1:] - ends[0], eod).tofile(file.with_name("files.bin"))
    sizes = (np.diff(ends) + 1).astype(np.int32)
    with file.with_name("files.idx").open("wb") as idx_file:
        sizes.tofile(idx_file)
        (np.cumsum(sizes, dtype=np.int64) - sizes).tofile(idx_file)
        np.arange(len(sizes) + 1).tofile(idx_file)


def write_in_a_loop(
    lines: Sequence[bytes], tokenizer: "GPT2TokenizerFast", eod: int, file: Path
) -> None:
    """Tokenize one line after the other."""
    sizes = []
    with file.with_name("loop.bin").open("wb") as bin_file:
        for line in lines:
            tokens = tokenizer(json.loads(line)["text"])["input_ids"]
            tokens.append(eod)
            sizes.append(len(tokens))
            bin_file.write(np.array(tokens, dtype=np.uint16).tobytes(order="C"))
    np.save(file.with_name("loop.npy"), sizes)


def by_turns(
    sides: Mapping[str, tuple[int, Callable[[], Callable[[], object]]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Return the median speeds of each side, in MB a second by CPU and by wall time.

    A side is its bytes, and what prepares a turn and returns the work that is measured.
    """
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, (num_bytes, prepare) in sides.items():
            cpu_s, wall_s = in_a_process(partial(timed, prepare))
            if turn:  # the first turn warms up the machine
                speeds[name].append((num_bytes / cpu_s / 1e6, num_bytes / wall_s / 1e6))
    found = {name: map(median, zip(*of, strict=True)) for name, of in speeds.items()}
    return {name: dict(zip(("CPU", "wall"), of, strict=True)) for name, of in found.items()}


def timed(prepare: Callable[[], Callable[[], object]]) -> tuple[float, float]:
    """Return the CPU and wall seconds of the work that `prepare` returns."""
    work = prepare()
    cpu_s, started_at = cpu_time(), time.monotonic()
    work()
    return cpu_time() - cpu_s, time.monotonic() - started_at


def in_a_process(work: Callable[[], Result]) -> Result:
    """Return the result of `work` in a process that ends with it."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(work()))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


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


def whole_process(file: Path, vocab: str, merges: str, rounds: int) -> str:
    """Return a line with the CPU time of the tool on a file of 8 MB."""
    command = [sys.executable, str(TOOL), "--input", str(file)]
    command += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    command += ["--vocab-file", vocab, "--merge-file", merges]
    command += ["--output-prefix", str(file.with_name("whole"))]
    found = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"whole process, 8 MB: {min(found):.2f} CPU s"


if __name__ == "__main__":
    run_tool(main)
