#!/usr/bin/env python
"""Keep the less toxic half of annotated texts: step 3 of detoxification (docs/detoxification.md).

Half of the texts that have a score are kept, in random order; texts without one are left out.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.detox.flags import SelectionConfig
from megatron.extensions.detox.toxicity.report import select_less_toxic


def main(argv: Sequence[str]) -> None:
    """Filter by the flags `argv`; print counts and toxicities."""
    own = {"selection": SelectionConfig}
    sections = parse_sections(argv, own, description=__doc__ or "").sections
    config: SelectionConfig = sections["selection"]
    for line in select_less_toxic(config.data_path, config.out_path, seed=config.seed):
        print(line)


if __name__ == "__main__":
    run_tool(main)
