#!/usr/bin/env python
"""Train a byte-level BPE vocabulary on texts: vocab.json and merges.txt for GPT2BPETokenizer."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.atomic_files import staged_folder
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, DataError, raise_if_any, reason
from megatron.config.parsing.declaration import range_problems
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.preprocess import TokenizerTrainingConfig
from megatron.data.preprocessing.preprocess import input_problems
from megatron.data.readers.documents import read_documents
from megatron.data.readers.inputs import find_sources, read_blocks
from megatron.data.readers.line_blocks import Limits
from megatron.tokenizer.bpe_training import train_byte_level_bpe

_LIMITS = Limits(block_bytes=1 << 20, line_bytes=1 << 28)


def main(argv: Sequence[str]) -> None:
    """Write the vocabulary of the texts of the command line `argv`."""
    parsed = parse_sections(argv, {"training": TokenizerTrainingConfig}, description=__doc__ or "")
    options: TokenizerTrainingConfig = parsed.sections["training"]
    output = Path(options.output)
    raise_if_any(
        [
            *range_problems(options),
            *([f"--output {output} exists: give a new folder"] if output.exists() else []),
            *input_problems(
                options.input, [options.json_key], options.document_separator, by_name=True
            ),
        ]
    )
    staging = output.with_name(f"{output.name}.unfinished")
    try:
        with staged_folder(staging, output) as folder:
            size = train_byte_level_bpe(with_text(texts(options)), folder, options.vocab_size)
    except OSError as error:
        raise ConfigError(f"--output {output}: {reason(error, str(output))}") from error
    print(f"{output}: vocab.json and merges.txt with {size} tokens")
    if size < options.vocab_size:
        print(f"--vocab-size {options.vocab_size}: the texts have no more pairs to merge")
    print(
        f"use it with --tokenizer-type GPT2BPETokenizer --vocab-file {output}/vocab.json "
        f"--merge-file {output}/merges.txt"
    )


def texts(options: TokenizerTrainingConfig) -> Iterator[str]:
    """Yield the text of every document.

    Raises:
        DataError: a line is not as expected; the message has the file and the beginning of the line.
    """
    sources = find_sources(options.input, options.document_separator, by_name=True)
    for block in read_blocks(sources, _LIMITS, columns=[options.json_key]):
        documents = read_documents(block, [options.json_key], _LIMITS.line_bytes)
        if documents.bad:
            raise DataError(f"--input {block.path}: {documents.bad[0].problem}")
        yield from documents.texts[0]


def with_text(documents: Iterator[str]) -> Iterator[str]:
    """Yield the documents.

    Raises:
        DataError: none has text.
    """
    has_text = False
    for text in documents:
        has_text = has_text or bool(text.strip())
        yield text
    if not has_text:
        raise DataError("the files of --input hold no text to train a vocabulary on")


if __name__ == "__main__":
    run_tool(main)
