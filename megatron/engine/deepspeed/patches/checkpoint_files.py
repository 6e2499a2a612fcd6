"""Patches for checkpoint files: which are found, read and copied."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.state_dict_factory import SDLoaderBase

log = logging.getLogger(__name__)


@contextmanager
def files_by_name() -> Iterator[None]:
    """Load checkpoint files by the names that this rank's have, inside the `with` block.

    DeepSpeed lists the folder once for each layer and for the rank (`_get_all_ckpt_names`,
    `ckpt_layer_path_list`), asks for the file of each replica (`_get_all_zero_checkpoints`) and reads
    the first file of each list, to compare a number in it with the length of the list
    (`check_ckpt_list`): as often as there are ranks and files. Our manifest lists all files.
    """
    replaced: Sequence[tuple[type, str, Callable[..., Any]]] = (
        (DeepSpeedEngine, "_get_all_ckpt_names", _own_main_file),
        (DeepSpeedEngine, "_get_all_zero_checkpoints", _own_partition),
        (PipelineModule, "ckpt_layer_path_list", _own_layer_file),
        (SDLoaderBase, "check_ckpt_list", _require_files),
    )
    usual = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(replaced, usual, strict=True):
            setattr(owner, name, function)


def _own_main_file(engine: Any, directory: str, tag: str) -> list[str]:
    """Return this rank's file in the place of each rank of the model (`_get_ckpt_name`)."""
    return [engine._get_ckpt_name(directory, tag)] * engine.mp_world_size


def _own_layer_file(module: Any, directory: str, layer: int) -> list[str]:
    """Return this rank's file of a layer in the place of each tensor-parallel rank (`_grid`)."""
    count = module._grid.get_slice_parallel_world_size()
    return [module.ckpt_layer_path(directory, layer)] * count


def _own_partition(engine: Any, directory: str, tag: str) -> dict[int, Any]:
    """Read this rank's optimizer state, by its number among the replicas (`_get_zero_ckpt_name`)."""
    file = engine._get_zero_ckpt_name(directory, tag)
    state = engine.checkpoint_engine.load(file, map_location="cpu")
    return {dist.get_rank(engine.optimizer.dp_process_group): state["optimizer_state_dict"]}


def _require_files(loader: SDLoaderBase) -> None:
    assert loader.ckpt_list, "no file for this part of the network"


def log_failed_script_copies(engine: Any) -> None:
    """Warn where `zero_to_fp32.py` cannot be copied into a checkpoint (`_copy_recovery_script`).

    Only rank 0 copies it, while the other ranks wait: a full disk must not end that rank alone.
    """
    copy = engine._copy_recovery_script

    def copy_or_log(directory: str) -> None:
        try:
            copy(directory)
        except OSError as error:
            log.warning("%s: DeepSpeed's zero_to_fp32.py cannot be put there: %s", directory, error)

    engine._copy_recovery_script = copy_or_log
