"""Read Megatron-LM's checkpoints in the format torch_dist, of megatron.core from version 0.16 on.

Names are megatron.core's; equal layers are stacked in a first dimension. The weights of a parameter
are read when they are needed, whatever the ranks that wrote them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpointing.megatron_lm.distributed_files import (
    METADATA,
    StoredFolder,
    StoredTensor,
    read_stored,
)
from megatron.checkpointing.megatron_lm.foreign_checkpoint import ForeignCheckpoint
from megatron.checkpointing.megatron_lm.hybrid import gpt_of_hybrid, is_hybrid
from megatron.checkpointing.megatron_lm.megatron import found_in, tracked_folder
from megatron.checkpointing.megatron_lm.optimizer_states import is_of_optimizer, states_in
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.common.errors import CheckpointError

KIND, COMMON = "metadata.json", "common.pt"
"""Files next to the tensors: the format, and content without tensors (up to version 0.16)."""

COMMON_OBJECT = "common_state/shard_0_1"
"""Name of the object with content without tensors, from version 0.17 on."""

_STACKED = re.compile(r"((?:\w+\.)?layers)\.(?!\d)(.+)")


def find(path: Path, *, heads: int | None = None) -> ForeignCheckpoint:
    """Read the checkpoint in `path`; tensors are read on access.

    Args:
        heads: attention heads, for files without arguments.

    Raises:
        CheckpointError: it is damaged, or of no network that has a form in these files.
    """
    folder = path if (path / METADATA).is_file() else tracked_folder(path, instead=METADATA)
    _require_kind(folder)
    stored = read_stored(folder)
    common = dict(_common(folder, stored))
    optimizer = states_in(stored.tensors, common)
    parameters = dict(_parameters(stored, optimizer.tensors))
    if is_hybrid(parameters):
        parameters, common["args"] = gpt_of_hybrid(parameters, common.get("args"), folder)
    content: dict[str, Any] = {**common, "model": parameters}
    found = found_in(folder, [[content]], heads=heads, holds_experts=True, steps=optimizer.steps)
    return replace(found, notices=[optimizer.notice] if optimizer.notice else [])


def _require_kind(folder: Path) -> None:
    """Refuse a folder of another format of Megatron-LM with the same names of files.

    Raises:
        CheckpointError: says how to save it.
    """
    try:
        kind = json.loads((folder / KIND).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = "unknown"
    if kind != "torch_dist":
        raise CheckpointError(
            f"{folder}: its format is {kind} by {KIND}, and only torch_dist is read: load it with "
            "Megatron-LM and save it with --ckpt-format torch_dist"
        )


def _common(folder: Path, stored: StoredFolder) -> Mapping[str, Any]:
    """Return the content without tensors: arguments, iteration, version.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if (folder / COMMON).is_file():
        found = read_foreign(folder / COMMON)
    elif COMMON_OBJECT in stored.objects:
        content = stored.objects[COMMON_OBJECT].read()
        found = content[0] if isinstance(content, list) and content else content
    else:
        raise CheckpointError(f"{folder} has neither {COMMON} nor the object {COMMON_OBJECT}")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{folder}: its arguments are not as Megatron-LM saves them")
    return found


def _parameters(
    stored: StoredFolder, states: Mapping[str, Mapping[str, StoredTensor]]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the parameters of every layer by megatron.core's names.

    Args:
        states: of the optimizer, by the names in the files.
    """
    for name, tensor in stored.tensors.items():
        if is_of_optimizer(name):
            continue
        tensor = replace(tensor, states=states.get(name, {}))
        if match := _STACKED.fullmatch(name):
            for number in range(len(tensor)):
                yield f"{match[1]}.{number}.{match[2]}", tensor.entry(number)
        else:
            yield name, tensor
