"""Put several pairs of token files (.bin and .idx) into one, in the order given."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.config.flags import Legacy, parse_sections
from megatron.config.merge import MergeConfig
from megatron.data.merge import merge
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.fingerprint import differences, read_record, write_record
from megatron.tool import run_tool

LEGACY = [
    Legacy("--torch-backend", "no effect: processes of this machine copy, without torch", takes=1),
    Legacy("--local_rank", "no effect: processes of this machine copy, without torch", takes=1),
    Legacy("--local-rank", "no effect: processes of this machine copy, without torch", takes=1),
]


def main(argv: Sequence[str]) -> None:
    """Merge as `argv` says, then say what was written."""
    parsed = parse_sections(argv, {"merge": MergeConfig}, description=__doc__, legacy=LEGACY)
    config: MergeConfig = parsed.sections["merge"]
    if config.workers is not None and config.workers < 1:
        raise ConfigError(f"--workers {config.workers}: give 1 or more")
    if config.workers is not None and config.merge == "serial":
        raise ConfigError("--workers: only --merge distributed has workers")
    if int(os.environ.get("RANK", "0")) > 0:
        return  # under a launcher of many ranks; the first one's workers copy everything
    for notice in parsed.notices:
        print(notice)
    records = [record for prefix in config.datasets if (record := read_record(prefix))]
    for record in records[1:]:
        if found := differences(records[0], record):
            raise DataError(
                "--datasets were made with different tokenizers, so their tokens do not mix: "
                + "; ".join(found)
            )
    workers = (config.workers or os.cpu_count() or 1) if config.merge == "distributed" else 1
    merged = merge(config.datasets, config.output_prefix, workers=workers)
    if len(records) == len(config.datasets):
        write_record(merged.prefix, records[0])
    print(
        f"{merged.prefix}.bin, .idx: documents: {merged.documents} | "
        f"sequences: {merged.sequences} | tokens: {merged.tokens}"
    )


if __name__ == "__main__":
    run_tool(main)
