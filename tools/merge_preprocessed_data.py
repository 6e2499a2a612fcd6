#!/usr/bin/env python
"""Put several pairs of token files (.bin and .idx) into one, in the order given."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere
# Without products of matrices, numpy's threads for them only cost 0.1 CPU seconds at the start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import DataError, WrongDataError, raise_if_any
from megatron.config.parsing.flags import Legacy, parse_sections
from megatron.config.run.urls import UrlConfig, cache_of
from megatron.config.tools.preprocess import MergeConfig
from megatron.data.token_files.merge import open_all, write_merged
from megatron.data.token_files.publish import prefix_problems, replacement_notices, staged_record
from megatron.data.token_files.remote_pairs import local_pair, upload_pair, with_local_output
from megatron.tokenizer.fingerprint import (
    TokenizerRecord,
    common_chat_template,
    differences,
    read_record,
    to_text,
)
from megatron.training.process.environment import read_launch
from megatron.training.process.launchers import write_root_cause

LEGACY = [
    Legacy("--torch-backend", "no effect: processes of this machine copy, without torch", takes=1),
    Legacy("--local_rank", "no effect: processes of this machine copy, without torch", takes=1),
    Legacy("--local-rank", "no effect: processes of this machine copy, without torch", takes=1),
]


def main(argv: Sequence[str]) -> None:
    """Merge by the flags `argv`, then print the written files."""
    log.configure(rank=0)
    known = {"merge": MergeConfig, "urls": UrlConfig}
    parsed = parse_sections(argv, known, description=__doc__, legacy=LEGACY)
    urls: UrlConfig = parsed.sections["urls"]
    config: MergeConfig
    config, output_url = with_local_output(parsed.sections["merge"], urls)
    raise_if_any(_problems(config))
    if read_launch(None).rank > 0:
        return  # under a launcher of many ranks; the first one's workers copy everything
    datasets = [local_pair(each, cache_of(urls)) for each in config.datasets]
    inputs = open_all(datasets, config.output_prefix)
    record = common_record(datasets)
    for notice in (*parsed.notices, *replacement_notices([config.output_prefix])):
        print(notice)
    workers = (config.workers or os.cpu_count() or 1) if config.merge == "distributed" else 1
    with staged_record([config.output_prefix], to_text(record) if record else ""):
        merged = write_merged(*inputs, config.output_prefix, workers=workers)
    num_bytes = sum(os.path.getsize(merged.prefix + suffix) for suffix in (".bin", ".idx"))
    if output_url:
        upload_pair(merged.prefix, output_url)
    print(
        f"{output_url or merged.prefix}.bin, .idx: documents: {merged.documents} | "
        f"sequences: {merged.sequences} | tokens: {merged.tokens} | "
        f"bytes of both files: {num_bytes}"
    )


def _problems(config: MergeConfig) -> Iterator[str]:
    if config.workers is not None and config.workers < 1:
        yield f"--workers {config.workers}: give 1 or more"
    elif config.workers is not None and config.merge == "serial":
        yield "--workers: only --merge distributed has workers"
    yield from prefix_problems(config.output_prefix, "all_text_document")


def common_record(prefixes: Sequence[str]) -> TokenizerRecord | None:
    """Return the record that all pairs have; None where one has none.

    Raises:
        DataError: two of them were made with different tokenizers or chat templates,
            or one holds conversations and another texts.
    """
    records = {prefix: record for prefix in prefixes if (record := read_record(prefix))}
    first = next(iter(records), "")
    for prefix, record in records.items():
        if found := differences(records[first], record):
            raise DataError(
                f"{prefix} was made with another tokenizer than {first}: {'; '.join(found)}; "
                "their tokens do not mix"
            )
    by_form = {
        bool(each.chat_template): prefix
        for prefix, each in records.items()
        if each.chat_template is not None
    }
    if len(by_form) > 1:
        raise WrongDataError(
            f"{by_form[True]} holds conversations and {by_form[False]} holds texts, which are read "
            "in different ways: merge files of one kind, and train on each with its script"
        )
    template = common_chat_template(prefixes)
    complete = set(records) == set(prefixes)
    return replace(records[first], chat_template=template) if complete else None


if __name__ == "__main__":
    run_tool(main, on_error=write_root_cause)
