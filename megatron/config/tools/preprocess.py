"""Preprocessing and merging of token files: flags."""

from dataclasses import dataclass, field
from typing import Literal

from megatron.config.parsing.declaration import setting


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Preprocessing of texts to token files."""

    input: list[str]
    """Files with one JSON object a line, or a JSON array of objects, or plain text, plain or
    compressed (.gz, .zst, .xz, .bz2), or Parquet files; folders, of which files with these names are
    read; globs; - for standard input. They are read one after the other."""

    input_format: Literal["auto", "json", "text"] = "auto"
    """What the inputs hold: json is one JSON object a line, or a JSON array of objects, or Parquet;
    text is plain text in UTF-8. auto decides for each file: all but Parquet are text with
    --document-separator; without it .txt and .md are, unless JSON begins them, and others are json."""

    document_separator: Literal["line", "blank-line", "file"] | None = None
    """What ends a document of plain text: each line is a document, or a blank line is between two,
    or each file is one (default: line)."""

    output_prefix: str | None = None
    """Path of the output, to which _KEY_document (or _sentence) and .bin and .idx are added. Only
    --find-optimal-num-workers needs none."""

    json_keys: list[str] = setting(factory=lambda: ["text"], older=("--json-key", "--columns"))
    """Keys, or columns, whose text to convert; each gets separate token files."""

    where: list[str] | None = None
    """Convert only documents with certain metadata: a key, which may have dots for objects within
    objects, and the values of which a document needs one, as meta.pile_set_name Github ArXiv. In a
    list one entry is enough; numbers, true, false and null are written as in JSON (default: convert
    all)."""

    conversations: bool = False
    """Lines are conversations, {"messages": [{"role": ..., "content": ...}]}, or pairs, {"prompt":
    ..., "completion": ...}: write their tokens, and which of them are answers, for
    finetune_sft.py."""

    chat_template: str | None = None
    """File with the Jinja template that writes the messages of --conversations (default: the
    tokenizer's own)."""

    append_eod: bool = False
    """End every document with the tokenizer's end-of-document token."""

    append_bos: bool = False
    """End every document with the tokenizer's beginning-of-sequence token, after --append-eod's."""

    prepend_space: bool = False
    """Add a space before every text that is not empty."""

    empty_documents: Literal["drop", "per-key", "keep", "megatron-lm"] = "drop"
    """Documents without a token under one of the keys: drop leaves them out under all keys; per-key
    under that key alone; keep writes them under all, with the end of --append-eod, and so does
    megatron-lm, as documents without a sequence and without an end."""

    split_sentences: bool = False
    """Make each sentence a sequence, for objectives on sentences: with NLTK's Punkt data where they are
    installed, or else with a model trained on the input itself."""

    lang: str = "english"
    """Language of NLTK's Punkt data, for --split-sentences."""

    keep_newlines: bool = False
    """Keep the white space that follows each sentence."""

    dataset_impl: Literal["lazy", "cached", "mmap"] = "mmap"
    """Format of the token files; lazy and cached are one format."""

    workers: int = 1
    """Processes that tokenize. The files do not depend on it."""

    chunk_size: int | None = None
    """Lines that a worker gets at a time at most (default: only bytes count)."""

    max_memory_mb: int = 1024
    """Memory for texts and tokens in progress, besides what each process needs to run. A line, or a
    row of a table, may have a sixteenth of it."""

    on_error: list[str] = field(default_factory=lambda: ["stop"])
    """What a bad line does: stop; skip; or collect FILE, which skips it and writes file, line,
    problem and excerpt to FILE."""

    resume: bool = False
    """Skip the shards that an interrupted run finished; the files equal an uninterrupted run's."""

    log_interval: int = 10_000
    """Documents between progress lines, where there is no terminal for a progress bar; there is one
    every ten seconds at least."""


@dataclass(frozen=True, kw_only=True)
class WorkerTrialConfig:
    """Search for the fastest number of workers."""

    find_optimal_num_workers: bool = False
    """Convert the first documents with several numbers of workers and print the fastest,
    instead of writing token files."""

    workers_to_check: list[int] = field(default_factory=lambda: [16, 32, 64])
    """Numbers of workers to try."""

    max_documents: int = 100_000
    """Documents to try them on, the first of the input."""


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingConfig:
    """Training of a vocabulary."""

    input: list[str]
    """Texts, as --input of preprocessing: JSON lines, plain text, Parquet, plain or compressed; files,
    folders, globs; - for standard input."""

    output: str
    """Folder for vocab.json and merges.txt, which must not exist."""

    vocab_size: int = setting(32000, at_least=257)
    """Number of tokens, at most."""

    json_key: str = "text"
    """Key, or column, of the text."""

    document_separator: Literal["line", "blank-line", "file"] | None = None
    """What ends a document of plain text (default: line)."""


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """Shards of one preprocessing job on several machines."""

    num_shards: int | None = None
    """Parts of the input, each for one process, such as a task of a SLURM array; the number of
    ranks under a launcher."""

    shard_index: int | None = None
    """The part of this process, from 0; the rank under a launcher."""

    merge: Literal["parallel", "serial"] = "parallel"
    """Copying when the shards are joined: by several threads, or by one."""

    merge_shards: bool = False
    """Join the finished shards of an array. Under a launcher rank 0 does so by itself."""

    timeout_s: int = 3600
    """Seconds that the ranks of a launcher wait for each other at the start, and rank 0 at the end
    for a shard on which nothing happens."""


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """The merge of token files."""

    datasets: list[str]
    """Paths of .bin/.idx pairs without the suffix; their documents keep this order."""

    output_prefix: str
    """Path of the new pair without the suffix."""

    merge: Literal["serial", "distributed"] = "serial"
    """Copying: by one thread, or by several."""

    workers: int | None = None
    """Threads of a distributed merge (default: the number of CPUs)."""
