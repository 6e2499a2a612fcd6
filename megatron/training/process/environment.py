"""Launcher, ranks and environment variables of this process, but for libraries' threads."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

from megatron.common.errors import ConfigError
from megatron.tensor_parallel.master_address import MasterAddress

LEVELS = ("debug", "info", "warning", "error", "critical")
"""Levels of messages, the least important first."""


@dataclass(frozen=True)
class Launch:
    """Ranks and world size of this process."""

    rank: int
    world_size: int
    local_rank: int  # on this node
    local_size: int  # processes on this node
    spares: int = 0  # processes after the last rank of the run, which wait for its end

    @property
    def processes(self) -> int:
        """Number of processes that the launcher has started."""
        return self.world_size + self.spares


@dataclass(frozen=True)
class Launcher:
    """The program that started this process and its peers, and will end them together."""

    name: Literal["", "deepspeed", "torch"]  # "": none of those
    max_restarts: int  # how often it starts everything again after a failure
    restarts: int  # how often it has


def read_launcher() -> Launcher:
    """Return the launcher that started this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        most, count = (f"TORCHELASTIC_{what}" for what in ("MAX_RESTARTS", "RESTART_COUNT"))
        return Launcher("torch", _number(most, 0), _number(count, 0))
    is_deepspeed = {"CROSS_SIZE", "LOCAL_SIZE"} <= set(os.environ)
    return Launcher("deepspeed" if is_deepspeed else "", 0, 0)


@dataclass(frozen=True)
class _Names:
    """Environment variables in which a job manager gives a process its rank."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]  # equal in all processes of a job, if set, and different in other jobs


_MPIS = (
    _Names(
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Names(
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("SLURM_JOB_ID", "PBS_JOBID"),
    ),
    # MPICH and Intel MPI.
    _Names(
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("SLURM_JOB_ID", "PBS_JOBID"),
    ),
)


@dataclass(frozen=True)
class _Managed:
    """Rank and sizes that MPI or SLURM gives the process it started, and their variables."""

    launch: Launch
    names: _Names


def _manager() -> _Managed | None:
    """Return the ranks of MPI or, without it, SLURM; None if neither started this process.

    mpirun may start its own processes through SLURM, whose variables then describe those.
    """
    for names in _MPIS:
        if all(os.environ.get(n) for n in (names.rank, names.world_size, names.local_rank)):
            world_size = _number(names.world_size, 1)
            return _Managed(
                Launch(
                    _number(names.rank, 0),
                    world_size,
                    _number(names.local_rank, 0),
                    _number(names.local_size, world_size),
                ),
                names,
            )
    return _slurm()


def _slurm() -> _Managed | None:
    # A batch script gets the variables of task 0 of all, though the other tasks are not started.
    is_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    if not os.environ.get("SLURM_PROCID") or is_script:
        return None
    # Of a job with several steps, SLURM_NTASKS may be the number of all.
    has_step = os.environ.get("SLURM_STEP_NUM_TASKS")
    size_name = "SLURM_STEP_NUM_TASKS" if has_step else "SLURM_NTASKS"
    world_size = _number(size_name, 1)
    counts = tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number("SLURM_NODEID", 0)
    local_size = counts[node] if node < len(counts) else world_size
    names = _Names(
        *("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    )
    rank = _number("SLURM_PROCID", 0)
    return _Managed(Launch(rank, world_size, _number("SLURM_LOCALID", rank), local_size), names)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Source: SLURM_TASKS_PER_NODE in the manual of srun.
    """
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it; "" of an empty one.

    >>> first_host("rack[07-09,12]n[1-2],login1")
    'rack07n1'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


def has_rank() -> bool:
    """Return whether a launcher has given this process a rank, even if it started no other."""
    return "RANK" in os.environ


def read_launch(local_rank: int | None) -> Launch:
    """Return this process's ranks, from its launcher's variables; rank 0 of 1 without them.

    RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE come first, which the deepspeed launcher and
    torch's set; what they do not say is read from Open MPI's variables, MVAPICH2's, MPICH's and
    Intel MPI's, or SLURM's.

    Args:
        local_rank: the value of `--local_rank`, for launchers that pass it only there.

    Raises:
        ConfigError: the variables contradict each other.
    """
    managed = _manager()
    default = managed.launch if managed else Launch(0, 1, 0, 1)
    rank, world_size = _number("RANK", default.rank), _number("WORLD_SIZE", default.world_size)
    if managed:
        _require_agreement(managed, rank, world_size)
    if world_size > 1 and world_size != default.world_size and not os.environ.get("RANK"):
        raise ConfigError(
            f"WORLD_SIZE={world_size} but RANK is not set: set both, or start through a launcher"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} with WORLD_SIZE={world_size}: ranks go from 0 to {world_size - 1}; "
            "set both, or start through a launcher"
        )
    # A manager's counts are of its tasks, not of the processes that one of them has started.
    if world_size != default.world_size:
        default = Launch(rank, world_size, rank, world_size)
    local = _number("LOCAL_RANK", default.local_rank if local_rank is None else local_rank)
    if local_rank is not None and local != local_rank:
        raise ConfigError(
            f"LOCAL_RANK={local} but --local_rank {local_rank}: leave one of them out"
        )
    size = _number("LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", default.local_size))
    return Launch(rank, world_size, local, size)


_APART = "for separate runs start each as a task of its own (srun --ntasks 1, mpirun -n 1)"


def _require_agreement(managed: _Managed, rank: int, world_size: int) -> None:
    """Refuse a rank that contradicts the one of MPI or SLURM.

    One task may be a process of the run, or a launcher that starts the processes of a node. A
    single task proves nothing: further tasks may have been started next to it.
    """
    names, tasks = managed.names, managed.launch.world_size
    started = f"{names.world_size}={tasks}"
    launcher = read_launcher().name
    # Torch's may begin, or go on after a failure, with fewer nodes; see `launch_notices`.
    if tasks == 1 or launcher == "torch":
        return
    if launcher:
        nodes = _number("CROSS_SIZE", tasks)
        if nodes != tasks:
            raise ConfigError(
                f"{started} but CROSS_SIZE={nodes}: {tasks} tasks were started, each of which "
                f"began a launcher that knows of {nodes}; start one task a node, and give the "
                f"launcher --num_nodes {tasks}; {_APART}"
            )
        return
    if world_size not in (tasks, tasks * _number("LOCAL_WORLD_SIZE", 1)):
        raise ConfigError(
            f"{started} but WORLD_SIZE={world_size}: unset WORLD_SIZE, or start so many tasks; "
            f"{_APART}"
        )
    if world_size == tasks and rank != managed.launch.rank:
        raise ConfigError(
            f"{names.rank}={managed.launch.rank} but RANK={rank}: unset RANK, or set it to "
            f"{names.rank} in each task, not in the script that starts them"
        )


def root_cause_file() -> Path | None:
    """Return the error file that torch's launcher reads after this process failed, if any."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file else None


def launch_notices() -> Iterator[str]:
    """Yield a warning for each likely mistake in how this process was launched."""
    managed = _manager()
    if not managed or read_launcher().name != "torch":
        return
    tasks = managed.launch.world_size
    nodes = _number("GROUP_WORLD_SIZE", tasks)
    if nodes < tasks:
        yield (
            f"{managed.names.world_size}={tasks} but GROUP_WORLD_SIZE={nodes}: {tasks} tasks were "
            f"started, and this run continues with {nodes}; if all were to share it, give each "
            f"launcher --nnodes {tasks}"
        )


def export_launch(launch: Launch, device: str, *, device_index: int | None = None) -> None:
    """Export the variables that libraries read and a launcher may not have set.

    torch.distributed reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; DeepSpeed takes the
    number of the device from LOCAL_RANK; DS_ACCELERATOR keeps it from choosing another kind than
    we do.

    Args:
        device_index: which of the devices that this process sees it uses; by its local rank when
            None.

    Raises:
        ConfigError: the address of the rendezvous is not known, or there is no such port.
    """
    if launch.rank < launch.world_size:
        os.environ["RANK"] = str(launch.rank)
        os.environ["WORLD_SIZE"] = str(launch.world_size)
    index = launch.local_rank if device_index is None else device_index
    os.environ["LOCAL_RANK"] = str(index)
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)  # DeepSpeed insists that both agree
    os.environ["DS_ACCELERATOR"] = device
    if not os.environ.get("MASTER_ADDR"):
        os.environ["MASTER_ADDR"] = _address_of_rank_0(launch)
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = str(_port_of_rank_0(launch))
    port = _number("MASTER_PORT", 0)
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port} is no port: set it to one from 1 to 65535")


def use_one_queue() -> str:
    """Set CUDA_DEVICE_MAX_CONNECTIONS to 1 if it is unset; return its value.

    The driver reads it when it creates the context of a process.
    """
    return os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def master_address(launch: Launch) -> MasterAddress:
    """Return the master address of this process, as written by `export_launch`."""
    return MasterAddress(
        os.environ["MASTER_ADDR"],
        _number("MASTER_PORT", 0),
        rank=launch.rank,
        world_size=launch.world_size,
        spares=launch.spares,
        is_hosted=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=read_launcher().restarts,
    )


def start_name(launch: Launch) -> str:
    """Return a text that all processes of one start share and processes of other starts do not."""
    port, attempt = os.environ.get("MASTER_PORT", ""), read_launcher().restarts
    return f"{port} {launch.world_size} {attempt}"


def _address_of_rank_0(launch: Launch) -> str:
    if launch.processes <= launch.local_size:
        return "127.0.0.1"
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if host := first_host(nodes) or _first_line(os.environ.get("PBS_NODEFILE", "")):
        return host
    raise ConfigError(
        f"WORLD_SIZE={launch.world_size} over several nodes but MASTER_ADDR is not set: set it "
        "to the address of the node of rank 0"
    )


def _first_line(file: str) -> str:
    if not file:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError as error:
        raise ConfigError(f"environment variable PBS_NODEFILE={file}: {error.strerror}") from error


def _port_of_rank_0(launch: Launch) -> int:
    if launch.processes == 1:
        with _free_port() as reserved:  # no other process comes there
            return reserved.getsockname()[1]
    managed = _manager()
    if managed is None or managed.launch.world_size != launch.processes:
        raise ConfigError(
            f"WORLD_SIZE={launch.world_size} but MASTER_PORT is not set: start through "
            "`deepspeed` or `python -m torch.distributed.run`, or set MASTER_ADDR and MASTER_PORT"
        )
    # All find the same one without talking, and jobs side by side on a node different ones. It is
    # below those that systems give to connections.
    job = " ".join(os.environ.get(name, "") for name in managed.names.job)
    if not job.strip():
        raise ConfigError(
            f"{managed.names.world_size}={launch.world_size} but MASTER_PORT is not set, and none "
            f"of {', '.join(managed.names.job)}, by which processes find a port: set MASTER_PORT "
            "to one that is free where rank 0 runs, the same for all processes"
        )
    return 20000 + crc32(job.encode()) % 10000


@contextmanager
def rank_environments(processes: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment variables of ranks that are to be started together on this node.

    Their MASTER_PORT stays reserved until exit. Rank 0 opens it seconds later, and a port that is
    only free now may by then be the local end of a connection.
    """
    with _free_port() as reserved:
        port = str(reserved.getsockname()[1])
        yield [
            {
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": str(processes)},
                **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            }
            for rank in range(processes)
        ]


def hides_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves no GPU to this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def compiled_extensions() -> Path:
    """Return the folder in which PyTorch compiles extensions and keeps them."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def export_restarts() -> None:
    """Let torch's launcher use a new rendezvous store after each failure.

    At the same one, ranks that come back early read the addresses of ranks that are gone.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def verbosity() -> str | None:
    """Return the log level of MEGATRON_DEEPSPEED_VERBOSITY, if it is set.

    Raises:
        ConfigError: it is none.
    """
    level = os.environ.get("MEGATRON_DEEPSPEED_VERBOSITY", "").lower()
    if level not in ("", *LEVELS):
        raise ConfigError(
            f"environment variable MEGATRON_DEEPSPEED_VERBOSITY={level!r} is not one of "
            + ", ".join(LEVELS)
        )
    return level or None


def perspective_api_key() -> str:
    """Return the key of the Perspective API; "" without one."""
    return os.environ.get("PERSPECTIVE_API_KEY", "").strip()


def export_determinism() -> None:
    """Export the variables of deterministic GPU libraries; keep set values that suffice.

    Raises:
        ConfigError: a variable says otherwise.

    Source: NVIDIA's documentation of cuBLAS (reproducibility) and NCCL (NCCL_ALGO).
    """
    for name, default, accepted in (
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":4096:8", ":16:8")),
        ("NCCL_ALGO", "Ring", ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")),
    ):
        current = os.environ.setdefault(name, default)
        if not set(current.split(",")) <= set(accepted):
            raise ConfigError(
                f"--deterministic-mode: environment variable {name}={current} lets results differ; "
                f"unset it, or write {' or '.join(accepted)}"
            )


def cpu_threads(launch: Launch) -> int:
    """Return the number of CPU threads of this process: its share of the cores."""
    return _number("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // launch.local_size))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={text!r} is not a number") from error


def _free_port() -> socket.socket:
    """Return a socket that reserves a free port until it is closed.

    It does not listen, and SO_REUSEADDR lets a store that sets it too, as PyTorch's does, listen
    there; the system gives the port to no connection and to no program that takes any port.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
