#!/usr/bin/env python
"""Train a byte-level BPE vocabulary, in the two files that GPT2BPETokenizer reads."""

import json
import os
import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

END_OF_TEXT = "<|endoftext|>"


def main() -> None:
    """Write vocab.json and merges.txt of the texts in --input to the folder --output."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="JSON lines with a key text")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of tokens, at most")
    args = parser.parse_args()

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts(args.input),
        vocab_size=args.vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    # Under another name until both files are there, so that a folder in its place is a whole one.
    unfinished = args.output.with_name(args.output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer.save_model(str(unfinished))
    os.replace(unfinished, args.output)
    print(f"{args.output}: vocab.json and merges.txt with {tokenizer.get_vocab_size()} tokens")


def texts(file: Path) -> Iterator[str]:
    """Yield the text of every line."""
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


if __name__ == "__main__":
    main()
