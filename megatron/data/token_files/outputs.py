"""The names of everything that a conversion writes."""

from collections.abc import Sequence
from pathlib import Path

from megatron.data.token_files.publish import RECORD


def stage_of(output_prefix: str) -> Path:
    """Return the directory of the work in progress, beside the output."""
    return Path(output_prefix + ".stage")


def report_of(output_prefix: str) -> str:
    """Return the path of the report."""
    return output_prefix + ".report.json"


def pair_prefix(output_prefix: str, key: str, *, split_sentences: bool) -> str:
    """Return the path of the token files of `key`, without suffix."""
    return f"{output_prefix}_{key}_{'sentence' if split_sentences else 'document'}"


def output_files(output_prefix: str, keys: Sequence[str], *, split_sentences: bool) -> list[str]:
    """Return the paths of all files that are there in the end, but for a list of bad lines."""
    pairs = [pair_prefix(output_prefix, key, split_sentences=split_sentences) for key in keys]
    of_pairs = [pair + end for pair in pairs for end in (".bin", ".bin.xxh3", ".idx", RECORD)]
    return [*of_pairs, report_of(output_prefix)]
