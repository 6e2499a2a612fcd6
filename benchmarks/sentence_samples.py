#!/usr/bin/env python
"""Cost of the samples of BERT and T5: rows of the sentence mapping, and samples, a CPU second.

The corpus has 1000 documents of 0 to 22 sentences of 3 to 63 tokens. Samples are read in their
order, with masks, from token files.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np

from megatron.common.cli import ToolParser, run_tool
from megatron.data.token_files.index_files import IndexContent, write_mmap_index
from megatron.data.token_files.indexed_dataset import IndexedDataset
from megatron.extensions.bert.data import BertDataset
from megatron.extensions.bert.flags import bert_samples, bert_sentences
from megatron.extensions.masked_lm.data import SentenceDataset
from megatron.extensions.masked_lm.data_mapping import build_sentence_mapping
from megatron.extensions.masked_lm.data_masking import MaskingVocabulary
from megatron.extensions.masked_lm.flags import MaskedLMConfig
from megatron.extensions.t5.data import T5Dataset
from megatron.extensions.t5.flags import t5_samples, t5_sentences
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

SEED = 1234
COUNTS = [(7919 * d) % 23 for d in range(1000)]
STARTS = np.concatenate([[0], np.cumsum(COUNTS)])
SIZES = np.array([3 + (104729 * i) % 61 for i in range(STARTS[-1])], np.int32)


def main(argv: Sequence[str]) -> None:
    """Measure, and print one line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5, help="turns; the fastest counts")
    args = parser.parse_args(argv)
    for prob in (0.1, 0.0):
        build = partial(
            build_sentence_mapping,
            SIZES,
            STARTS,
            num_samples=args.rows,
            max_length=509,
            short_seq_prob=prob,
            seed=SEED,
            min_sentences=2,
        )
        seconds = fastest(build, args.rounds)
        rate = args.rows / seconds / 1e6
        print(f"mapping, short sequences {prob}: {rate:.2f} million rows per CPU-s")
    with tempfile.TemporaryDirectory() as directory:
        corpus, vocab_file = write_corpus(Path(directory))
        for name, seq_length, decoder in (("bert", 512, 0), ("bert", 128, 0), ("t5", 512, 128)):
            dataset = masked(corpus, vocab_file, name, seq_length, decoder)
            seconds = fastest(partial(read, dataset, args.samples), args.rounds)
            lengths = f"{seq_length}/{decoder}" if decoder else str(seq_length)
            print(f"samples of {name}, {lengths} tokens: {args.samples / seconds:.0f} per CPU-s")


def read(dataset: BertDataset | T5Dataset, count: int) -> None:
    """Read the first samples."""
    for i in range(count):
        dataset[i]


def fastest(function: Callable[[], object], rounds: int) -> float:
    """Return the least CPU seconds of several calls."""
    found = []
    for _ in range(rounds):
        started_at = time.process_time()
        function()
        found.append(time.process_time() - started_at)
    return min(found)


def write_corpus(folder: Path) -> tuple[IndexedDataset, Path]:
    """Write token files and a vocabulary, every third token of which goes on with a word."""
    tokens = 5 + (7907 * np.arange(SIZES.sum(dtype=np.int64))) % 995
    (folder / "corpus.bin").write_bytes(tokens.astype("<u2").tobytes())
    content = IndexContent(
        dtype=np.dtype("<u2"),
        num_sequences=len(SIZES),
        num_documents=len(COUNTS),
        sizes=lambda: iter([SIZES]),
        document_starts=lambda: iter([STARTS]),
    )
    with (folder / "corpus.idx").open("wb") as file:
        write_mmap_index(file, content)
    words = [("##" if i % 3 == 2 else "") + f"w{i}" for i in range(5, 1000)]
    vocab_file = folder / "vocab.txt"
    vocab_file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    return IndexedDataset(folder / "corpus"), vocab_file


def masked(
    corpus: IndexedDataset, vocab_file: Path, name: str, seq_length: int, decoder: int
) -> BertDataset | T5Dataset:
    """Return the masked samples of an objective."""
    config = MaskedLMConfig(decoder_seq_length=decoder or None)
    sentences = SentenceDataset(
        corpus,
        range(len(COUNTS)),
        num_samples=5000,
        seq_length=seq_length,
        seed=SEED,
        sentences=(bert_sentences if name == "bert" else t5_sentences)(config),
    )
    plan = (bert_samples if name == "bert" else t5_samples)(config, seq_length=seq_length)
    tokenizer = WordPieceTokenizer(vocab_file, lower_case=True, extra_ids=100)
    if name == "bert":
        vocabulary = MaskingVocabulary.of(tokenizer, "cls", "sep", "mask", "pad")
        return BertDataset(sentences, plan=plan, vocabulary=vocabulary, seed=SEED)
    vocabulary = MaskingVocabulary.of(tokenizer, "pad", "bos", "eos")
    return T5Dataset(sentences, plan=plan, vocabulary=vocabulary, seed=SEED)


if __name__ == "__main__":
    run_tool(main)
