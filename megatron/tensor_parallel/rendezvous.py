"""Rendezvous: how processes find each other through MASTER_ADDR and MASTER_PORT, in bounded time."""

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
"""How long a name may take to resolve, and a port that is open to answer as a store of torch."""

_SILENCE_S = 10.0
"""How long processes may wait for each other before a log line names where."""

_PAUSE_S = 0.5
_MOST_NAMED = 8


def meet(
    place: MasterAddress, timeout: timedelta, *, look: Callable[[], None] = lambda: None
) -> Store:
    """Return the store of all processes as soon as all have come.

    A name that does not resolve, a port that another program has, and processes that do not come
    end in an error of one sentence each on every rank. A process that waits for a port to open
    does so for `timeout`, because rank 0 may start later.

    Args:
        timeout: how long to wait for other processes.
        look: called about twice a second while this process waits; may raise.

    Raises:
        TrainingError: the processes do not meet.

    Communication: waits for every rank.
    """
    if place.world_size == 1:
        return HashStore()
    reminder = threading.Timer(
        _SILENCE_S,
        log.info,
        ("waiting at %s until all %d processes have come", place, place.world_size),
    )
    reminder.daemon = True
    reminder.start()
    try:
        _require_name(place, look)
        if not place.hosts:
            _wait_for_port(place, timeout, look)
        store = _open(place, look)
        store.set_timeout(timeout)
        _check_in(store, place, timeout, look)
    finally:
        reminder.cancel()
    return store


def _require_name(place: MasterAddress, look: Callable[[], None]) -> None:
    """Wait until MASTER_ADDR resolves: that of a host which is just starting may be added late."""
    give_up_at = time.monotonic() + ANSWER_S
    while True:
        try:
            resolve = partial(socket.getaddrinfo, place.host, place.port)
            _bounded(resolve, ANSWER_S, look, "no name server answers")
        except (OSError, UnicodeError) as error:
            if time.monotonic() > give_up_at:
                reason = getattr(error, "strerror", None) or error
                raise TrainingError(
                    f"MASTER_ADDR={place.host} does not resolve on {socket.gethostname()} "
                    f"({reason}): set it to the name or address of the host of rank 0"
                ) from error
        else:
            return
        look()
        time.sleep(_PAUSE_S)


def _wait_for_port(place: MasterAddress, timeout: timedelta, look: Callable[[], None]) -> None:
    """Wait until something listens: rank 0 may start later."""
    give_up_at = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() > give_up_at:
                raise TrainingError(
                    f"rank {place.rank} waited {_readable(timeout)} for rank 0 at {place}, where "
                    f"nothing listens ({error.strerror or error}); check that rank 0 was started, "
                    "that MASTER_ADDR is its host, and that no firewall closes the port"
                ) from error
        else:
            return
        look()
        time.sleep(_PAUSE_S)


def _open(place: MasterAddress, look: Callable[[], None]) -> TCPStore:
    """Return the store that this process runs or connects to.

    A client of torch waits without a limit for a program that accepts connections and is silent.
    """
    open_store = partial(
        TCPStore,
        place.host,
        place.port,
        place.world_size,
        place.hosts,
        timeout=timedelta(seconds=ANSWER_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    foreign = (
        f"what listens at {place} (MASTER_ADDR:MASTER_PORT) does not answer as rank 0 of this run: "
        "another program has the port, or rank 0 has stopped; start all processes with a port "
        "that is free where rank 0 runs"
    )
    try:
        # Its own limit first.
        return _bounded(open_store, 1.5 * ANSWER_S, look, foreign)
    except TimeoutError as error:
        raise TrainingError(str(error)) from error
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in reason:
            message = (
                f"MASTER_PORT={place.port} is taken on {socket.gethostname()} by another program, "
                f"or by another run: start all {place.world_size} processes with a port that is "
                "free"
            )
        elif place.hosts:
            message = (
                f"rank 0 on {socket.gethostname()} cannot be reached at {place} ({reason}): set "
                "MASTER_ADDR to the name or address of its host, and MASTER_PORT to a free port"
            )
        else:
            message = f"{foreign} ({reason})"
        raise TrainingError(message) from error


def _check_in(
    store: Store, place: MasterAddress, timeout: timedelta, look: Callable[[], None]
) -> None:
    """Wait until every rank of this run, and no other run's, has come to `store`."""
    meeting = PrefixStore("meeting", store)
    size = str(place.world_size)
    if place.rank == 0:
        meeting.set("size", size)
    # Rank 0 sets it as soon as it has a store; a launcher has one before rank 0 starts.
    first = timeout if place.is_hosted else timedelta(seconds=ANSWER_S)
    stranger = (
        f"the store at {place} (MASTER_ADDR:MASTER_PORT) is not of this run: rank 0 has not come "
        f"there for {_readable(first)}; start all processes with a port that is free where rank 0 runs"
    )
    _poll(lambda: meeting.check(["size"]), first, look, lambda: stranger)
    if (there := meeting.get("size").decode()) != size:
        raise TrainingError(
            f"{place} (MASTER_ADDR:MASTER_PORT) is of a run of {there} processes, and this one has "
            f"{size}: give each run its own port"
        )
    if meeting.add(f"rank {place.rank}", 1) > 1 and not place.is_hosted:
        raise TrainingError(
            f"another process has come to {place} as rank {place.rank}: give each run its own "
            "MASTER_PORT, and each process its own RANK"
        )
    meeting.add("come", 1)

    def missing() -> str:
        ranks = [r for r in range(place.world_size) if not meeting.check([f"rank {r}"])]
        named = ", ".join(map(str, ranks[:_MOST_NAMED])) + ", ..." * (len(ranks) > _MOST_NAMED)
        return (
            f"of {size} processes {len(ranks)} (ranks {named}) have not come to {place} in "
            f"{_readable(timeout)}: check that all were started and none has failed, and that every "
            "host reaches that address and port (a firewall, the network interface in "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME); --distributed-timeout-minutes is how long "
            "they wait"
        )

    _poll(lambda: meeting.add("come", 0) >= place.world_size, timeout, look, missing)


def _poll(
    is_so: Callable[[], bool],
    limit: timedelta,
    look: Callable[[], None],
    late: Callable[[], str],
) -> None:
    """Wait until `is_so`, in questions to a store, each of which is bounded too.

    Raises:
        TrainingError: it is not within `limit`; what `late` returns.
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
    """Return what `make` returns in a thread of its own, or raise what it raises.

    Raises:
        TimeoutError: it has not returned in time; the message is `late`.
    """
    made: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:  # raised where it is waited for
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
