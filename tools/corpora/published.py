#!/usr/bin/env python
"""Turn a published data set into token files: a folder of the Hugging Face hub, or shards of any corpus.

--input is a folder, or files: JSON lines, plain or compressed, Parquet, Arrow. Writes token files
and PREFIX.corpus.json, the report. A run that was stopped continues with the same command.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.config.tools.preprocess import PreprocessConfig
from megatron.data.preprocessing.command import parse_flags, text_separator, to_command
from megatron.data.preprocessing.recipe import tokenize_corpus
from megatron.extensions.corpora.flags import PublishedConfig
from megatron.extensions.corpora.published import find_published, text_key


def main(argv: Sequence[str]) -> None:
    """Convert by the flags `argv`, then print the report."""
    log.configure(rank=0)
    parsed = parse_flags(argv, description=__doc__ or "", extra={"published": PublishedConfig})
    config: PreprocessConfig = parsed.sections["preprocess"]
    flags: PublishedConfig = parsed.sections["published"]
    found = find_published(
        config.input,
        config_name=flags.config_name,
        split=flags.split_name,
        licence=flags.licence,
        date=flags.date,
    )
    config = replace(config, input=list(found.files))
    has_keys = not config.conversations and text_separator(config) is None
    if has_keys and config.json_keys == ["text"]:
        config = replace(config, json_keys=[text_key(found.files[0])])
    if not found.source["licence"]:
        print("warning: no licence is known for the report; give --licence")
    sections = {**parsed.sections, "preprocess": config}
    tokenize_corpus(to_command(replace(parsed, sections=sections)), {"source": found.source})


if __name__ == "__main__":
    run_tool(main)
