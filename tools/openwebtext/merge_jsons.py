#!/usr/bin/env python
"""Put all files of JSON lines of a directory into one."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere


from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.common.remote_files import is_url
from megatron.config.parsing.declaration import setting
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.corpora.cleaning.records import new_files, read_lines


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Options of the merge."""

    json_path: str = setting(".", flag="--json_path")
    """Directory whose *.json files are put together, in the order of their names."""

    output_file: str = setting("merged_output.json", flag="--output_file")
    """File for all their lines; if it is in that directory, it is not read."""


def main(argv: Sequence[str]) -> None:
    """Merge by the flags `argv`, then print the counts."""
    sections = parse_sections(argv, {"merge": MergeConfig}, description=__doc__).sections
    config: MergeConfig = sections["merge"]
    output = config.output_file
    output_path = output if is_url(output) else Path(output).resolve()
    found = sorted(Path(config.json_path).glob("*.json"))
    inputs = [str(path) for path in found if path.resolve() != output_path]
    if not inputs:
        raise ConfigError(f"no *.json file to merge in --json_path {config.json_path}")
    with new_files(output_path) as (merged,):
        for line in read_lines(inputs):
            line.record()
            merged.write(line.raw)
    print(f"{output}: files: {len(inputs)} | documents: {merged.lines}")


if __name__ == "__main__":
    run_tool(main)
