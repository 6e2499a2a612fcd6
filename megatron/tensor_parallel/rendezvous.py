"""Rendezvous of all processes through MASTER_ADDR and MASTER_PORT, with timeouts and diagnoses."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from megatron.common.errors import TrainingError
from megatron.tensor_parallel.master_address import MasterAddress

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 30.0
"""Time limit for resolving the host name, and for an open port to answer as a TCPStore."""

_SILENCE_S = 10.0
"""Waiting time before a log line names the master address."""

_PAUSE_S = 0.5
_MOST_NAMED = 8


def rendezvous(
    master: MasterAddress, timeout: timedelta, *, look: Callable[[], None] = lambda: None
) -> Store:
    """Wait for all processes and return their store.

    A name that does not resolve, a port used by another program and missing processes each give
    one error on every rank. The port may open within `timeout`, because rank 0 may start later.

    Args:
        timeout: for other processes.
        look: called about twice a second while waiting; may raise.

    Raises:
        TrainingError: the rendezvous failed.

    Communication: waits for every rank.
    """
    if master.world_size == 1:
        return HashStore()
    reminder = threading.Timer(
        _SILENCE_S,
        log.info,
        ("waiting at %s until all %d processes have come", master, master.world_size),
    )
    reminder.daemon = True
    reminder.start()
    try:
        _require_name(master, look)
        if not master.hosts:
            _wait_for_port(master, timeout, look)
        store = _open(master, look)
        store.set_timeout(timeout)
        _check_in(store, master, timeout, look)
    finally:
        reminder.cancel()
    return store


def _require_name(master: MasterAddress, look: Callable[[], None]) -> None:
    """Wait until MASTER_ADDR resolves: the name of a starting host may be added late."""
    give_up_at = time.monotonic() + ANSWER_S
    while True:
        try:
            resolve = partial(socket.getaddrinfo, master.host, master.port)
            _bounded(resolve, ANSWER_S, look, "no name server answers")
        except (OSError, UnicodeError) as error:
            if time.monotonic() > give_up_at:
                reason = getattr(error, "strerror", None) or error
                raise TrainingError(
                    f"MASTER_ADDR={master.host} does not resolve on {socket.gethostname()} "
                    f"({reason}): set it to the name or address of the host of rank 0"
                ) from error
        else:
            return
        look()
        time.sleep(_PAUSE_S)


def _wait_for_port(master: MasterAddress, timeout: timedelta, look: Callable[[], None]) -> None:
    """Wait until the port is open: rank 0 may start later."""
    give_up_at = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((master.host, master.port), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() > give_up_at:
                raise TrainingError(
                    f"rank {master.rank} waited {_readable(timeout)} for rank 0 at {master}, where "
                    f"nothing listens ({error.strerror or error}); check that rank 0 was started, "
                    "that MASTER_ADDR is its host, and that no firewall closes the port"
                ) from error
        else:
            return
        look()
        time.sleep(_PAUSE_S)


def _open(master: MasterAddress, look: Callable[[], None]) -> TCPStore:
    """Start or connect to the TCPStore.

    A torch client waits without a limit for a program that accepts connections and does not answer.
    """
    open_store = partial(
        TCPStore,
        master.host,
        master.port,
        master.world_size,
        master.hosts,
        timeout=timedelta(seconds=ANSWER_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    foreign = (
        f"what listens at {master} (MASTER_ADDR:MASTER_PORT) does not answer as rank 0 of this run: "
        "another program has the port, or rank 0 has stopped; start all processes with a port "
        "that is free where rank 0 runs"
    )
    try:
        # The store's own timeout comes first.
        return _bounded(open_store, 1.5 * ANSWER_S, look, foreign)
    except TimeoutError as error:
        raise TrainingError(str(error)) from error
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in reason:
            message = (
                f"MASTER_PORT={master.port} is taken on {socket.gethostname()} by another program, "
                f"or by another run: start all {master.world_size} processes with a port that is "
                "free"
            )
        elif master.hosts:
            message = (
                f"rank 0 on {socket.gethostname()} cannot be reached at {master} ({reason}): set "
                "MASTER_ADDR to the name or address of its host, and MASTER_PORT to a free port"
            )
        else:
            message = f"{foreign} ({reason})"
        raise TrainingError(message) from error


def _check_in(
    store: Store, master: MasterAddress, timeout: timedelta, look: Callable[[], None]
) -> None:
    """Wait until every rank of this run, and of no other run, has connected to `store`."""
    keys = PrefixStore("meeting", store)
    size = str(master.world_size)
    if master.rank == 0:
        keys.set("size", size)
    # Rank 0 sets the key right after opening the store; a launcher opens it before rank 0 starts.
    first = timeout if master.is_hosted else timedelta(seconds=ANSWER_S)
    stranger = (
        f"the store at {master} (MASTER_ADDR:MASTER_PORT) is not of this run: rank 0 has not come "
        f"there for {_readable(first)}; start all processes with a port that is free where rank 0 runs"
    )
    _poll(lambda: keys.check(["size"]), first, look, lambda: stranger)
    if (there := keys.get("size").decode()) != size:
        raise TrainingError(
            f"{master} (MASTER_ADDR:MASTER_PORT) is of a run of {there} processes, and this one has "
            f"{size}: give each run its own port"
        )
    if keys.add(f"rank {master.rank}", 1) > 1 and not master.is_hosted:
        raise TrainingError(
            f"another process has come to {master} as rank {master.rank}: give each run its own "
            "MASTER_PORT, and each process its own RANK"
        )
    keys.add("come", 1)

    def missing() -> str:
        ranks = [r for r in range(master.world_size) if not keys.check([f"rank {r}"])]
        named = ", ".join(map(str, ranks[:_MOST_NAMED])) + ", ..." * (len(ranks) > _MOST_NAMED)
        return (
            f"of {size} processes {len(ranks)} (ranks {named}) have not come to {master} in "
            f"{_readable(timeout)}: check that all were started and none has failed, and that every "
            "host reaches that address and port (a firewall, the network interface in "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME); --distributed-timeout-minutes is how long "
            "they wait"
        )

    _poll(lambda: keys.add("come", 0) >= master.world_size, timeout, look, missing)


def _poll(
    is_so: Callable[[], bool],
    limit: timedelta,
    look: Callable[[], None],
    late: Callable[[], str],
) -> None:
    """Poll a store until `is_so`; each request has a time limit too.

    Raises:
        TrainingError: not within `limit`, with the message of `late`.
    """
    give_up_at = time.monotonic() + limit.total_seconds()
    silent = f"rank 0 does not answer any more for {ANSWER_S:g} s: it has stopped or lost its host"
    try:
        while not _bounded(is_so, ANSWER_S, look, silent):
            if time.monotonic() > give_up_at:
                raise TrainingError(_bounded(late, ANSWER_S, look, silent))
            look()
            time.sleep(_PAUSE_S)
    except TimeoutError as error:
        raise TrainingError(str(error)) from error


def _bounded(make: Callable[[], T], limit_s: float, look: Callable[[], None], late: str) -> T:
    """Call `make` in a thread with a time limit; return its result or raise its exception.

    Raises:
        TimeoutError: with the message `late`.
    """
    made: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:  # raised in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    give_up_at = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < give_up_at:
        thread.join(_PAUSE_S)
        if thread.is_alive():
            look()
    if errors:
        raise errors[0]
    if not made:
        raise TimeoutError(late)
    return made[0]


def _readable(limit: timedelta) -> str:
    seconds = limit.total_seconds()
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
