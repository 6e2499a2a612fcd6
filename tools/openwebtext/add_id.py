#!/usr/bin/env python
"""Give each document an id: PREFIX-0000000000, PREFIX-0000000001 and so on."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.corpora.cleaning.records import new_files, read_lines, to_bytes

ID_KEY = "adlr_id"


@dataclass(frozen=True, kw_only=True)
class IdConfig:
    """Options of the numbering."""

    input_file: str
    """File with one JSON object a line."""

    output_file: str
    """File for the same objects, each with its id under the key adlr_id."""

    id_prefix: str
    """Prefix of each id."""

    log_interval: int = 100
    """Documents between two lines of progress where there is no terminal for a bar."""


def main(argv: Sequence[str]) -> None:
    """Number by the flags `argv`, then print the counts."""
    sections = parse_sections(argv, {"id": IdConfig}, description=__doc__).sections
    config: IdConfig = sections["id"]
    if config.log_interval < 1:
        raise ConfigError(f"--log-interval {config.log_interval}: give 1 or more")
    inputs = [config.input_file]
    with new_files(config.output_file, inputs=inputs) as (output,):
        for line in read_lines(inputs, log_interval=config.log_interval):
            document_id = f"{config.id_prefix}-{output.lines:010d}"
            output.write(to_bytes({**line.record(), ID_KEY: document_id}))
    print(f"{config.output_file}: documents: {output.lines}")


if __name__ == "__main__":
    run_tool(main)
