"""What can be asked of the tools that look at checkpoints and convert them."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class UniversalConfig:
    """A checkpoint to be written without its layout."""

    input_folder: Annotated[str, Spelling("--input_folder")]
    """Folder of one checkpoint: global_stepN in the directory of --save."""

    output_folder: Annotated[str, Spelling("--output_folder")]
    """Folder to write; latest_universal beside it names it afterwards."""

    num_extract_workers: Annotated[int, Spelling("--num_extract_workers")] = 4
    """Processes that read and write; each holds one tensor. There is one pass over the tensors, so
    the larger of this and --num_merge_workers is taken."""

    num_merge_workers: Annotated[int, Spelling("--num_merge_workers")] = 2
    """See --num_extract_workers."""


@dataclass(frozen=True, kw_only=True)
class LookConfig:
    """Which checkpoint to look at."""

    path: str
    """Folder of one checkpoint, or directory of several, of which the newest is taken; may stand
    first, without the flag."""

    parameters: bool = False
    """Tell every tensor too."""
