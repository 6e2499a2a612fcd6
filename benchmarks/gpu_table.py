#!/usr/bin/env python
"""Write the results of tests/gpu/prove.sh as tables into a page in Markdown.

The tables replace what is between the two lines `<!-- one GPU -->` and `<!-- /one GPU -->`. Without
--page they are printed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from gpu_report import report

from megatron.common.atomic_files import replace_text
from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import ConfigError, DataError, reason

MARKERS = ("<!-- one GPU -->", "<!-- /one GPU -->")


def main(argv: Sequence[str]) -> None:
    """Print the tables, or write them into the page.

    Raises:
        DataError: the file of results cannot be read.
        ConfigError: the page has no markers, or the results are those of a rehearsal.
    """
    parser = ToolParser(description=__doc__)
    parser.add_argument("results", nargs="+", help="the JSON files that tests/gpu/prove.sh wrote")
    parser.add_argument("--page", help="page to write into, such as docs/performance.md")
    args = parser.parse_args(argv)
    results = [_read(file) for file in args.results]
    text = "\n".join(report(results))
    if args.page is None:
        print(text)
        return
    for file, result in zip(args.results, results, strict=True):
        if result["rehearsal"]:
            raise ConfigError(
                f"{file} is of a rehearsal on a CPU, which is no result of a GPU; leave --page out "
                "to print it"
            )
    page = Path(args.page)
    before, found, rest = page.read_text().partition(MARKERS[0])
    _, closed, after = rest.partition(MARKERS[1])
    if not (found and closed):
        raise ConfigError(f"--page {page} has no lines {' and '.join(MARKERS)}")
    replace_text(page, f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")


def _read(file: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {reason(error)}") from error
    return result


if __name__ == "__main__":
    run_tool(main)
