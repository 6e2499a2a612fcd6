"""Rendezvous of all processes through MASTER_ADDR and MASTER_PORT, with timeouts and diagnoses."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from megatron.common.errors import TrainingError
from megatron.tensor_parallel.master_address import MasterAddress

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_NAMED = 8

_MOST_REQUESTS = 4000
"""Requests per second that waiting ranks make of rank 0, all together."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of a rendezvous, in seconds.

    Args:
        answer_s: for resolving the host name, and for an open port to answer as a TCPStore.
        silence_s: waiting time before a log line names the ranks that are missing.
        repeat_s: time between two such lines.
        pause_s: between two looks; longer for thousands of ranks, see `_MOST_REQUESTS`.
    """

    answer_s: float = 30.0
    silence_s: float = 10.0
    repeat_s: float = 60.0
    pause_s: float = 0.5


def rendezvous(
    master: MasterAddress,
    timeout: timedelta,
    *,
    look: Callable[[], None] = lambda: None,
    patience: Patience = Patience(),
    store: Store | None = None,
) -> Store:
    """Wait for all processes and return their store.

    A name that does not resolve, a port used by another program and missing processes each give
    one error on every rank. The port may open within `timeout`, because rank 0 may start later.

    Args:
        timeout: for other processes.
        look: called about twice a second while waiting; may raise.
        patience: the other time limits.
        store: where the processes meet; default: a TCPStore at `master`.

    Raises:
        TrainingError: the rendezvous failed.

    Communication: waits for every rank.
    """
    if master.processes == 1:
        return HashStore()
    meeting = _Rendezvous(master, timeout, look, patience)
    store = _attempt_store(master, meeting.open() if store is None else store)
    meeting.check_in(store)
    return store


def set_key(master: MasterAddress, key: str, patience: Patience = Patience()) -> None:
    """Set a key in the store at `master`, which other processes wait for."""
    store = TCPStore(
        *(master.host, master.port, master.processes, False),
        timeout=timedelta(seconds=patience.answer_s),
        wait_for_workers=False,
    )
    _attempt_store(master, store).set(key, "")


def _attempt_store(master: MasterAddress, store: Store) -> Store:
    """Return the view of a launcher's store in which no earlier attempt has left keys.

    Source: torch.distributed.rendezvous, which does the same.
    """
    if not master.is_hosted:
        return store
    return PrefixStore(f"attempt {master.attempt} of {master.processes}", store)


class _Rendezvous:
    """The steps of a rendezvous: resolve the name, open the store, count the ranks."""

    def __init__(
        self,
        master: MasterAddress,
        timeout: timedelta,
        look: Callable[[], None],
        patience: Patience,
    ):
        self.master, self.timeout, self.look, self.patience = master, timeout, look, patience
        self._reminds_at = time.monotonic() + patience.silence_s
        self._pause_s = max(patience.pause_s, master.world_size / _MOST_REQUESTS)

    def open(self) -> Store:
        """Return the store at `master`, which rank 0 or a launcher starts."""
        self._require_name()
        if not self.master.hosts:
            self._wait_for_port()
        store = self._connect()
        store.set_timeout(self.timeout)
        return store

    def _require_name(self) -> None:
        """Wait until MASTER_ADDR resolves: the name of a starting host may be added late."""
        master = self.master
        give_up_at = time.monotonic() + self.patience.answer_s
        while True:
            try:
                resolve = partial(socket.getaddrinfo, master.host, master.port)
                self._call_within(resolve, self.patience.answer_s, "no name server answers")
            except (OSError, UnicodeError) as error:
                if time.monotonic() > give_up_at:
                    reason = getattr(error, "strerror", None) or error
                    raise TrainingError(
                        f"MASTER_ADDR={master.host} does not resolve on {socket.gethostname()} "
                        f"({reason}): set it to the name or address of the host of rank 0"
                    ) from error
            else:
                return
            self._pause(lambda: f"the address of {master}")

    def _wait_for_port(self) -> None:
        """Wait until the port is open: rank 0 may start later."""
        master = self.master
        give_up_at = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                socket.create_connection((master.host, master.port), timeout=5.0).close()
            except OSError as error:
                if time.monotonic() > give_up_at:
                    raise TrainingError(
                        f"rank {master.rank} waited {_readable(self.timeout)} for rank 0 at {master}, where "
                        f"nothing listens ({error.strerror or error}); check that rank 0 was started, "
                        "that MASTER_ADDR is its host, and that no firewall closes the port"
                    ) from error
            else:
                return
            self._pause(lambda: f"rank 0 at {master}")

    def _pause(self, waiting: Callable[[], str]) -> None:
        """Wait a moment; log what is missing, the first time after some seconds."""
        self.look()
        if time.monotonic() > self._reminds_at:
            log.info("waiting for %s", waiting())
            self._reminds_at = time.monotonic() + self.patience.repeat_s
        time.sleep(self._pause_s)

    def _connect(self) -> TCPStore:
        """Start or connect to the TCPStore.

        A torch client waits without a limit for a program that accepts connections and does not
        answer.
        """
        master = self.master
        open_store = partial(
            TCPStore,
            master.host,
            master.port,
            master.processes,
            master.hosts,
            timeout=timedelta(seconds=self.patience.answer_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_loopback_listener(master) if master.hosts else None,
        )
        foreign = (
            f"what listens at {master} (MASTER_ADDR:MASTER_PORT) does not answer as rank 0 of this run: "
            "another program has the port, or rank 0 has stopped; start all processes with a port "
            "that is free where rank 0 runs"
        )
        try:
            # The store's own timeout comes first.
            return self._call_within(open_store, 1.5 * self.patience.answer_s, foreign)
        except TimeoutError as error:
            raise TrainingError(str(error)) from error
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            reason = str(error).partition("\n")[0]
            if "EADDRINUSE" in reason:
                message = (
                    f"MASTER_PORT={master.port} is taken on {socket.gethostname()} by another program, "
                    f"or by another run: start all {master.processes} processes with a port that is "
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

    def check_in(self, store: Store) -> None:
        """Wait until every rank of this run, and of no other run, has connected to `store`."""
        master, keys = self.master, PrefixStore("meeting", store)
        size = str(master.processes)
        if master.rank == 0:
            keys.set("size", size)
        # Rank 0 sets the key right after opening the store; a launcher opens it before rank 0 starts.
        first = self.timeout if master.is_hosted else timedelta(seconds=self.patience.answer_s)
        stranger = (
            f"the store at {master} (MASTER_ADDR:MASTER_PORT) is not of this run: rank 0 has not come "
            f"there for {_readable(first)}; start all processes with a port that is free where rank 0 runs"
        )
        self._poll(
            lambda: keys.check(["size"]), first, lambda: stranger, lambda: f"rank 0 at {master}"
        )
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
            ranks = [r for r in range(master.processes) if not keys.check([f"rank {r}"])]
            named = ", ".join(map(str, ranks[:_MOST_NAMED])) + ", ..." * (len(ranks) > _MOST_NAMED)
            return f"{len(ranks)} of {size} processes (ranks {named})"

        def missing_for_all() -> str:
            """Return who is missing: the first to ask finds out, with a request for each rank."""
            if keys.add("asked", 1) == 1:
                keys.set("missing", missing())
            keys.wait(["missing"], timedelta(seconds=self.patience.answer_s / 2))
            return str(keys.get("missing").decode())

        def late() -> str:
            return (
                f"{missing_for_all()} have not come to {master} in {_readable(self.timeout)}: check that all were started and none has failed, and that every "
                "host reaches that address and port (a firewall, the network interface in "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME); --distributed-timeout-minutes is how long "
                "they wait"
            )

        def waiting() -> str:
            # On rank 0 alone: it takes a request for each rank.
            return f"{missing() if master.rank == 0 else 'the other processes'} at {master}"

        self._poll(lambda: keys.add("come", 0) >= master.processes, self.timeout, late, waiting)

    def _poll(
        self,
        is_so: Callable[[], bool],
        limit: timedelta,
        late: Callable[[], str],
        waiting: Callable[[], str],
    ) -> None:
        """Poll a store until `is_so`; each request has a time limit too.

        Raises:
            TrainingError: `is_so` is not reached within `limit`, with the message of `late`.
        """
        give_up_at = time.monotonic() + limit.total_seconds()
        answer_s = self.patience.answer_s
        silent = f"rank 0 has not answered for {answer_s:g} s: it has stopped or lost its host"
        try:
            while not self._call_within(is_so, answer_s, silent):
                if time.monotonic() > give_up_at:
                    raise TrainingError(self._call_within(late, answer_s, silent))
                self._pause(lambda: self._call_within(waiting, answer_s, silent))
        except TimeoutError as error:
            raise TrainingError(str(error)) from error

    def _call_within(self, make: Callable[[], T], limit_s: float, late: str) -> T:
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
            thread.join(self.patience.pause_s)
            if thread.is_alive():
                self.look()
        if errors:
            raise errors[0]
        if not made:
            raise TimeoutError(late)
        return made[0]


def _loopback_listener(master: MasterAddress) -> int | None:
    """Return the descriptor of a socket that listens where only this host reaches it.

    torch's store listens on every interface. None where other hosts may have to reach it, and for a
    port that is taken, for which torch has the error.
    """
    if not master.is_loopback:
        return None
    family = socket.AF_INET6 if ":" in master.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((master.host, master.port))
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener.detach()


def _readable(limit: timedelta) -> str:
    seconds = limit.total_seconds()
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
