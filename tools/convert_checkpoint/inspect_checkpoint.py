#!/usr/bin/env python
"""List names, shapes and dtypes of the tensors in a checkpoint file: `inspect_checkpoint.py FILE`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import run_tool, with_flag
from megatron.common.errors import WrongCheckpointError, near
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.checkpoint_tools import FileConfig


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    argv = with_flag(argv, "--file", "the path of a file")
    parsed = parse_sections(argv, {"file": FileConfig}, description=__doc__ or "").sections
    config: FileConfig = parsed["file"]
    if not (file := Path(config.file)).is_file():
        raise WrongCheckpointError(f"{file}: there is no such file{near(file)}")
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.resharding.unpickle import read_tensors

    for line in _lines(read_tensors(file), ""):
        print(line)


def _lines(node: Any, name: str) -> Iterator[str]:
    """Yield a line for everything below `node`."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _lines(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, list | tuple) and not all(isinstance(x, int | float) for x in node):
        for number, value in enumerate(node):
            yield from _lines(value, f"{name}[{number}]")
    elif hasattr(node, "dtype"):
        yield f"{name}: {list(node.shape)} {str(node.dtype).removeprefix('torch.')}"
    elif type(node).__module__.startswith("megatron."):
        yield from _lines(vars(node), name)
    else:
        yield f"{name}: {node}"


if __name__ == "__main__":
    run_tool(main)
