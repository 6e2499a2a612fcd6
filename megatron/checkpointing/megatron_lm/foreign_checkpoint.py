"""What a checkpoint of another program holds, in the names and rows of this one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpointing.resharding.sharded_tensor import WholeCheckpoint


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """A state of training that another program left.

    Args:
        folder: where its files lie.
        flags: words of a command line of ours for a network like it, as far as the files tell.
        rows: of the table of tokens, padding included.
        vocab_size: tokens without padding; None where the files do not tell.
        whole: the weights, and what the optimizer keeps if that can be read.
        state: fields of TrainState.
        has_optimizer: whether `whole` has its states.
        notices: what is left out, one sentence each.
    """

    folder: Path
    flags: Sequence[str]
    rows: int
    vocab_size: int | None
    whole: WholeCheckpoint
    state: Mapping[str, int] = field(default_factory=dict)
    has_optimizer: bool = False
    notices: Sequence[str] = ()
