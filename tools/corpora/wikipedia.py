#!/usr/bin/env python
"""Turn a dump of Wikipedia into token files: articles, their text, then tokens.

Writes PREFIX.articles.jsonl, the token files, and PREFIX.corpus.json, the report. Further flags as
for tools/preprocess_data.py. A run that was stopped continues with the same command.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.common.remote_files import is_url
from megatron.config.parsing.parser import peek
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.recipe import corpus_report_of, tokenize_corpus
from megatron.extensions.corpora.cleaning.wikipedia import extract_articles
from megatron.extensions.corpora.flags import WikipediaConfig


def main(argv: Sequence[str]) -> None:
    """Convert by the flags `argv`, then print the report."""
    log.configure(rank=0)
    given = peek(argv)
    if given.get("input") is not None:
        raise ConfigError("--input is for tools/preprocess_data.py; --dump names the dump")
    prefix = given.get("output_prefix") or "wikipedia"
    if is_url(prefix):
        raise ConfigError(
            f"--output-prefix {prefix}: the articles are written to a folder, and no URL"
        )
    articles, report_path = f"{prefix}.articles.jsonl", corpus_report_of(prefix)
    command = read_flags(
        [*argv, "--input", articles],
        description=__doc__ or "",
        extra={"wikipedia": WikipediaConfig},
    )
    config: WikipediaConfig = command.sections["wikipedia"]
    report = extract_articles(
        config.dump, articles, report_path, licence=config.licence, workers=command.spec.workers
    )
    print(f"{articles}: {' | '.join(f'{kind}: {n}' for kind, n in report['pages'].items())}")
    tokenize_corpus(command, report)


if __name__ == "__main__":
    run_tool(main)
