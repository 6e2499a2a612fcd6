"""Corpus recipes: token files of a published source, and PREFIX.corpus.json, the report about it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.common.atomic_files import replace_text
from megatron.data.preprocessing.assemble import Written
from megatron.data.preprocessing.command import PreprocessCommand
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.token_files.publish import report_of
from megatron.data.token_files.remote_pairs import deliver


def corpus_report_of(output_prefix: str) -> str:
    """Return the path of the report of a corpus."""
    return f"{output_prefix}.corpus.json"


def write_report(path: str, report: Mapping[str, Any]) -> None:
    """Write the report of a corpus."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    replace_text(Path(path), text, has_one_writer=True, is_flushed=True)


def tokenize_corpus(command: PreprocessCommand, report: Mapping[str, Any]) -> list[Written]:
    """Write the token files, or continue an interrupted attempt; add their counts to the report.

    Args:
        report: about the source, and the counts of steps before this one.

    Raises:
        DataError: as `preprocess`.
        MegatronError: a process was killed.
    """
    for notice in command.notices:
        print(notice)
    spec = command.spec
    written = preprocess(replace(spec, resume=spec.resume or spec.staging.exists()))
    counts = json.loads(Path(report_of(spec.output_prefix)).read_text(encoding="utf-8"))
    documents = {
        "left out by --where": counts["unselected_documents"],
        "bad": counts["bad_lines"],
        "without a token": counts["dropped_documents"],
        "written": counts["documents"],
    }
    documents = {"read": sum(documents.values()), **documents}
    tokens = [
        {"prefix": command.final(each.prefix), "documents": each.documents, "tokens": each.tokens}
        for each in written
    ]
    path = corpus_report_of(spec.output_prefix)
    write_report(path, {**report, "documents": documents, "token_files": tokens})
    command.deliver(written)
    if command.output_url:
        deliver([(path, command.final(path))])
    return written
