#!/usr/bin/env python
"""Fetch web pages and extract their texts, politely: the step of OpenWebText that needs a network.

Writes JSON lines with url, title, date and text to --pages, and pages without text to
PAGES.failures. A run that was stopped continues with the same command.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import DataError, raise_if_any
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.corpora.cleaning.records import read_lines, to_bytes
from megatron.extensions.corpora.cleaning.resumable import resumable_output
from megatron.extensions.corpora.cleaning.web_pages import Manners, build_extractor, visit_pages
from megatron.extensions.corpora.flags import FetchConfig


def main(argv: Sequence[str]) -> None:
    """Fetch by the flags `argv`, then print the counts."""
    sections = parse_sections(argv, {"fetch": FetchConfig}, description=__doc__ or "").sections
    config: FetchConfig = sections["fetch"]
    positive = {
        "--request-timeout-s": config.request_timeout_s,
        "--max-page-mb": config.max_page_mb,
        "--threads": config.threads,
    }
    problems = [f"{flag} {n}: give more than 0" for flag, n in positive.items() if n <= 0]
    if config.host_delay_s < 0:
        problems.append(f"--host-delay-s {config.host_delay_s}: give 0 or more")
    raise_if_any(problems)
    if Path(config.pages).exists():
        print(f"{config.pages} is there")
        return
    counts = fetch(config)
    print(f"{config.pages}: " + " | ".join(f"{kind}: {count}" for kind, count in counts.items()))


def fetch(config: FetchConfig) -> dict[str, int]:
    """Fetch the pages that earlier attempts left; return the numbers of pages and failures.

    Raises:
        ConfigError: trafilatura is not installed, or earlier attempts had other URLs.
        DataError: no page has a text.
    """
    extract = build_extractor()
    lines = (line.raw.decode("utf-8", "replace").strip() for line in read_lines([config.urls]))
    urls = list(dict.fromkeys(lines))
    manners = Manners(
        user_agent=config.user_agent,
        delay_s=config.host_delay_s,
        timeout_s=config.request_timeout_s,
        max_bytes=int(config.max_page_mb * (1 << 20)),
    )
    outputs = (f"{config.pages}.failures", config.pages)
    made_by = {"urls": config.urls}
    with (
        resumable_output(outputs[0], made_by, inputs=[config.urls]) as failures,
        resumable_output(outputs[1], made_by, inputs=[config.urls]) as pages,
    ):
        counts = {"pages": pages.earlier, "failures": failures.earlier}
        done = {json.loads(line)["url"] for output in (pages, failures) for line in output.lines()}
        temporary = []  # which another attempt tries again
        left = [url for url in urls if url not in done]
        for visit in visit_pages(left, manners, extract, threads=config.threads):
            counts["failures" if visit.record is None else "pages"] += 1
            failure = to_bytes({"url": visit.url, "problem": visit.problem})
            if visit.record is not None:
                pages.write(to_bytes(visit.record))
            elif visit.is_temporary:
                temporary.append(failure)
            else:
                failures.write(failure)
        if not counts["pages"]:
            raise DataError(f"none of the {len(urls)} URLs of {config.urls} has a text")
        failures.write(*temporary)
    return counts


if __name__ == "__main__":
    run_tool(main)
