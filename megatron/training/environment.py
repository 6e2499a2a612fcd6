"""What started this process: the only file that reads environment variables."""

import os
import socket
from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
"""Levels of messages, the least important first."""


@dataclass(frozen=True)
class Launch:
    """This process's place among those that were started together."""

    rank: int
    world_size: int
    local_rank: int  # on this node
    local_size: int  # processes on this node


@dataclass(frozen=True)
class Launcher:
    """The program that started this process beside others, and will end it with them."""

    name: Literal["", "deepspeed", "torch"]  # "": none of those
    max_restarts: int  # how often it starts everything again after a failure
    restarts: int  # how often it has


def read_launcher() -> Launcher:
    """Return what started this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        most, count = (f"TORCHELASTIC_{what}" for what in ("MAX_RESTARTS", "RESTART_COUNT"))
        return Launcher("torch", _number(most, 0), _number(count, 0))
    is_deepspeed = {"CROSS_SIZE", "LOCAL_SIZE"} <= set(os.environ)
    return Launcher("deepspeed" if is_deepspeed else "", 0, 0)


def read_launch(local_rank: int | None) -> Launch:
    """Return this process's place, from the launcher's variables; a lone process without them.

    Works under the deepspeed launcher, torch.distributed.run and launch, and without a launcher.

    Args:
        local_rank: what `--local_rank` says, for launchers that say it there alone.

    Raises:
        ConfigError: the variables contradict each other.
    """
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if world_size > 1 and not os.environ.get("RANK"):
        raise ConfigError(
            f"WORLD_SIZE={world_size} but RANK is not set: set both, or start through a launcher"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} with WORLD_SIZE={world_size}: ranks go from 0 to {world_size - 1}; "
            "set both, or start through a launcher"
        )
    local = _number("LOCAL_RANK", rank if local_rank is None else local_rank)
    if local_rank is not None and local != local_rank:
        raise ConfigError(
            f"LOCAL_RANK={local} but --local_rank {local_rank}: leave one of them out"
        )
    size = _number("LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", world_size))
    return Launch(rank, world_size, local, size)


def export_launch(launch: Launch, device: str, *, sequence_parallel: bool = False) -> None:
    """Write what libraries look for and a launcher may not have said.

    DeepSpeed's pipeline reads LOCAL_RANK, torch.distributed the others; DS_ACCELERATOR keeps
    DeepSpeed from choosing another device than we do.
    """
    if device == "cuda" and sequence_parallel:
        # One queue of work: collectives start in the order in which they were asked for.
        queues = os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if queues != "1":
            raise ConfigError(
                f"CUDA_DEVICE_MAX_CONNECTIONS={queues} with --sequence-parallel: set it to 1 or "
                "unset it, so that collectives run in the order of the computation around them"
            )
    os.environ["RANK"] = str(launch.rank)
    os.environ["WORLD_SIZE"] = str(launch.world_size)
    os.environ["LOCAL_RANK"] = str(launch.local_rank)
    os.environ["DS_ACCELERATOR"] = device
    if "MASTER_ADDR" not in os.environ and launch.world_size > launch.local_size:
        raise ConfigError(
            f"WORLD_SIZE={launch.world_size} over several nodes but MASTER_ADDR is not set: set it "
            "to the address of the node of rank 0"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if launch.world_size == 1:
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    elif "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE={launch.world_size} but MASTER_PORT is not set: start through "
            "`deepspeed` or `python -m torch.distributed.run`, or set MASTER_ADDR and MASTER_PORT"
        )


def export_restarts() -> None:
    """Let torch's launcher meet again at a new place after each failure.

    At the same one, ranks that come back early read the addresses of those that are gone.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def verbosity() -> str | None:
    """Return the level of messages that MEGATRON_DEEPSPEED_VERBOSITY says, if it is set.

    Raises:
        ConfigError: it is none.
    """
    level = os.environ.get("MEGATRON_DEEPSPEED_VERBOSITY", "").lower()
    if level not in ("", *LEVELS):
        raise ConfigError(
            f"environment variable MEGATRON_DEEPSPEED_VERBOSITY={level!r} is none of "
            + ", ".join(LEVELS)
        )
    return level or None


def export_determinism() -> None:
    """Write what makes GPU libraries repeat their results; keep what was said and does that too.

    Raises:
        ConfigError: a variable says otherwise.

    Source: NVIDIA's documentation of cuBLAS (reproducibility) and NCCL (NCCL_ALGO).
    """
    for name, default, accepted in (
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":4096:8", ":16:8")),
        ("NCCL_ALGO", "Ring", ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")),
    ):
        said = os.environ.setdefault(name, default)
        if not set(said.split(",")) <= set(accepted):
            raise ConfigError(
                f"--deterministic-mode: environment variable {name}={said} lets results differ; "
                f"unset it, or write {' or '.join(accepted)}"
            )


def cpu_threads(launch: Launch) -> int:
    """Return how many threads this process computes with on a CPU, so that all have a share."""
    return _number("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // launch.local_size))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={text!r} is not a number") from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
