#!/usr/bin/env python
"""Print the contents of a pair of token files: `inspect_data.py PREFIX`.

Documents are shown as text with the tokenizer that PREFIX.tokenizer.json records, or with the one
that the flags say. The .bin is compared with the digests of its blocks, if it has any.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np

from megatron.common.atomic_files import replacing
from megatron.common.cli import run_tool, with_flag
from megatron.common.errors import ConfigError
from megatron.common.remote_files import is_url
from megatron.config.data.tokenizer import TokenizerConfig, tokenizer_arguments
from megatron.config.parsing.flags import parse_sections
from megatron.config.plugins import PluginModulesConfig, load_plugins, modules_in
from megatron.config.run.urls import UrlConfig, cache_of
from megatron.config.tools.data_tools import InspectConfig
from megatron.data.preprocessing.quality import Lengths, readable_lengths
from megatron.data.token_files.block_digests import digests_path, write_digests
from megatron.data.token_files.index_files import pieces_of
from megatron.data.token_files.indexed_dataset import IndexedDataset, infer_format, open_token_files
from megatron.data.token_files.pair_files import existing_pair
from megatron.data.token_files.publish import write_errors_name
from megatron.data.token_files.remote_pairs import local_pair
from megatron.extensions.masked_lm.data_mapping import count_unused
from megatron.tokenizer.build import tokenizer_for
from megatron.tokenizer.types.tokenizer import Tokenizer


def main(argv: Sequence[str]) -> None:
    """Print the contents of the token files of the command line `argv`."""
    argv = with_flag(argv, "--prefix", "the prefix of token files")
    load_plugins(modules_in(argv))
    sections = {
        **{"inspect": InspectConfig, "tokenizer": TokenizerConfig},
        **{"plugins": PluginModulesConfig, "urls": UrlConfig},
    }
    parsed = parse_sections(argv, sections, description=__doc__ or "").sections
    config: InspectConfig = parsed["inspect"]
    options: TokenizerConfig = parsed["tokenizer"]
    for flag, value in (("--documents", config.documents), ("--max-tokens", config.max_tokens)):
        if value < 0:
            raise ConfigError(f"{flag} {value} must be at least 0")
    is_given = options != TokenizerConfig()
    if config.write_digests and is_url(config.prefix):
        raise ConfigError(
            f"--write-digests: {config.prefix} is a URL; write them before the upload"
        )
    urls: UrlConfig = parsed["urls"]
    prefix = local_pair(config.prefix, cache_of(urls))
    if config.write_digests:
        replace_digests(prefix)
    dataset = open_token_files(prefix)
    dataset.verify()
    dataset.tokens.verify()
    arguments = tokenizer_arguments(options, default="GPT2BPETokenizer") if is_given else None
    tokenizer, about = tokenizer_for(prefix, arguments)
    for line in summary(dataset):
        print(line)
    print(f"tokenizer: {about}")
    for line in first_documents(dataset, config, tokenizer):
        print(line)


def summary(dataset: IndexedDataset) -> Iterator[str]:
    """Yield the figures of `dataset`."""
    lengths = document_lengths(dataset)
    ids = dataset.tokens
    yield f"prefix: {dataset.prefix}"
    yield f"format: {infer_format(dataset.prefix)} | data type: {dataset.dtype.name}"
    yield f"documents: {len(lengths)} | sequences: {len(dataset)} | tokens: {len(ids)}"
    yield f".bin: {dataset.bin_path.stat().st_size} bytes | .idx: {dataset.idx_path.stat().st_size} bytes"
    yield digests_line(dataset)
    if len(lengths):
        counted = Lengths()
        counted.add(lengths)
        yield readable_lengths(counted.summary())
        yield f"empty documents: {int((lengths == 0).sum())}"
        if len(dataset) > len(lengths):
            unused = count_unused(dataset.sizes, dataset.document_starts, min_sentences=2)
            yield f"sentences: {len(dataset)} | documents that BERT does not use: {unused}"
    if len(ids):
        extremes = [(int(piece.min()), int(piece.max())) for piece in pieces_of(ids)]  # read once
        lowest, highest = zip(*extremes, strict=True)
        yield f"token ids: {min(lowest)} to {max(highest)}"


def digests_line(dataset: IndexedDataset) -> str:
    """Return the integrity of the .bin of `dataset` after a comparison with its digests."""
    if dataset.tokens.has_digests:
        return f"digests: {dataset.tokens.num_blocks} blocks, all as they were written"
    return "digests: none, so damage to the .bin would not be found; --write-digests makes them"


def replace_digests(prefix: str) -> None:
    """Write the digests of PREFIX.bin as it is, replacing older ones."""
    bin_path, _ = existing_pair(prefix)
    target = digests_path(bin_path)
    with write_errors_name(target), replacing(target) as temporary:
        write_digests(bin_path, temporary)


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Return the tokens of each document, whose sequences follow one another."""
    ends = np.concatenate([[0], np.cumsum(dataset.sizes, dtype=np.int64)])
    return np.diff(ends[dataset.document_starts])


def first_documents(
    dataset: IndexedDataset, config: InspectConfig, tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yield the first documents: as text if the tokenizer has all ids, otherwise as ids."""
    starts = dataset.document_starts
    for i in range(min(config.documents, len(starts) - 1)):
        first, stop = int(starts[i]), int(starts[i + 1])
        size, room, texts = int(dataset.sizes[first:stop].sum()), config.max_tokens, []
        for sequence in range(first, stop):
            shown = dataset[sequence][:room].tolist()
            room -= len(shown)
            has_text = tokenizer is not None and max(shown, default=0) < tokenizer.vocab_size
            texts += [repr(tokenizer.decode(shown)) if has_text else " ".join(map(str, shown))]
            if not room:
                break
        left = size - config.max_tokens + room
        rest = f" ... {left} more" if left else ""
        yield f"document {i}: {size} tokens: {' | '.join(texts)}{rest}"


if __name__ == "__main__":
    run_tool(main)
