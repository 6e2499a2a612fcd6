"""A failed rendezvous ends every process with a message, in bounded time."""

import socket
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from ports import free_port
from problems import require_problem

from megatron.common.errors import PeerLeftError, TrainingError
from megatron.tensor_parallel import rendezvous as meeting
from megatron.tensor_parallel.master_address import MasterAddress
from megatron.training.process.environment import Launch, master_address

SOON = timedelta(seconds=2)
LATE = timedelta(minutes=5)


SHORT = meeting.Patience(answer_s=2.0, pause_s=0.05, silence_s=0.1, repeat_s=0.2)


def place(port, rank=1, **others):
    return MasterAddress(**{"host": "127.0.0.1", "world_size": 2, **others}, port=port, rank=rank)


def refused(where, timeout=LATE, **words):
    """Return the message of the error with which a process at `where` ends."""
    with pytest.raises(TrainingError) as error:
        meeting.rendezvous(where, timeout, patience=SHORT, **words)
    assert "\n" not in str(error.value)
    return str(error.value)


@contextmanager
def program(answer):
    """Have another program listen, which calls `answer` with each connection; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve():
            kept = []
            while True:
                try:
                    kept.append(door.accept()[0])
                except OSError:
                    return
                answer(kept[-1])

        threading.Thread(target=serve, daemon=True).start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)


@contextmanager
def store_of_rank_0():
    """Have torch's store listen, as that of another run does; yield it."""
    yield dist.TCPStore(
        "127.0.0.1", 0, 2, True, timeout=timedelta(seconds=5), wait_for_workers=False
    )


def test_all_ranks_meet():
    port, stores = free_port(), {}

    def come(rank):
        stores[rank] = meeting.rendezvous(place(port, rank, world_size=3), LATE, patience=SHORT)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].set("word", "x")
    assert [stores[rank].get("word") for rank in (1, 2)] == [b"x", b"x"]


@pytest.mark.parametrize(
    ("host", "loopback", "elsewhere"),
    [("127.0.0.1", True, False), ("localhost", True, False), ("0.0.0.0", True, True)],
)
def test_other_hosts_reach_the_store_only_where_master_addr_is_not_the_loopback(
    host, loopback, elsewhere
):
    port = free_port()
    meet = partial(meeting.rendezvous, timeout=LATE, patience=SHORT)
    other = threading.Thread(target=meet, args=(place(port, 1, host=host),))
    other.start()
    store = meet(place(port, 0, host=host))
    other.join()
    reached = []
    for address in ("127.0.0.1", "127.0.0.2"):  # the second is another address of this machine
        with socket.socket() as connection:
            reached.append(connection.connect_ex((address, port)) == 0)
    assert reached == [loopback, elsewhere]
    store.set("key", "x")


def test_a_process_alone_needs_no_port():
    with program(lambda connection: None) as port:
        store = meeting.rendezvous(place(port, 0, world_size=1), LATE, patience=SHORT)
        assert isinstance(store, dist.HashStore)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: None,
        lambda connection: connection.close(),
        lambda connection: (connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n"), connection.close()),
    ],
    ids=["silent", "closes", "http"],
)
def test_a_port_of_another_program_ends_every_rank(answer):
    with program(answer) as port:
        require_problem(f"MASTER_PORT={port} … taken", [refused(place(port, 0))])
        require_problem(
            f"listens at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)", [refused(place(port, 1))]
        )


def test_the_store_of_another_program_ends_a_rank():
    with store_of_rank_0() as store:
        assert "is not of this run" in refused(place(store.port))


def test_the_store_of_another_run_ends_a_rank():
    with store_of_rank_0() as store:
        theirs = dist.PrefixStore("meeting", store)
        theirs.set("size", "4")
        assert "of 4 processes" in refused(place(store.port))
        theirs.set("size", "2")
        theirs.add("rank 1", 1)
        assert "another process" in refused(place(store.port))
        # A launcher's own store is of this run, however often its ranks have come.
        hosted = dist.PrefixStore("attempt 0 of 2", store)
        hosted = dist.PrefixStore("meeting", hosted)
        hosted.set("size", "2")
        hosted.add("rank 1", 1)
        hosted.add("come", 1)
        meeting.rendezvous(place(store.port, is_hosted=True), LATE, patience=SHORT)


def test_a_restarted_run_sees_no_key_of_the_attempt_before_in_its_launchers_store():
    with store_of_rank_0() as launchers:
        stores = []
        for attempt in (0, 1):
            meet = partial(meeting.rendezvous, timeout=LATE, patience=SHORT)
            where = partial(place, launchers.port, is_hosted=True, attempt=attempt)
            other = threading.Thread(target=meet, args=(where(1),))
            other.start()
            stores.append(meet(where(0)))
            other.join()
            stores[-1].add("address of a dead rank", 1)
        assert stores[1].add("address of a dead rank", 0) == 1
        # So does the key that spares wait for.
        meeting.set_key(where(0), "end")
        assert [store.check(["end"]) for store in stores] == [False, True]


def test_a_name_that_does_not_resolve_ends_a_rank_soon():
    for rank in (0, 1):
        messages = refused(place(1, rank, host="no-such-host.invalid"))
        assert messages.startswith("MASTER_ADDR=no-such-host.invalid does not resolve on ")


def test_a_name_server_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words: threading.Event().wait())
    assert "name server" in refused(place(1, host="host"))


def test_a_rank_0_that_starts_late_is_waited_for(messages):
    port = free_port()
    hosted = []

    def come():
        while not messages:
            threading.Event().wait(0.05)
        hosted.append(meeting.rendezvous(place(port, 0), LATE, patience=SHORT))

    late = threading.Thread(target=come)
    late.start()
    meeting.rendezvous(place(port, 1), LATE, patience=SHORT)
    late.join()
    assert f"waiting for rank 0 at 127.0.0.1:{port}" in messages


def test_an_address_without_a_listener_is_reported():
    port = free_port()
    messages = refused(place(port), SOON)
    assert messages.startswith(f"rank 1 waited 2 s for rank 0 at 127.0.0.1:{port}, where nothing")


def test_missing_ranks_are_logged_while_rank_0_waits_and_named_in_the_error(messages):
    message = refused(place(port := free_port(), 0, world_size=3), SOON)
    assert "2 of 3 processes (ranks 1, 2)" in message and "GLOO_SOCKET_IFNAME" in message
    assert messages.count(f"waiting for 2 of 3 processes (ranks 1, 2) at 127.0.0.1:{port}") > 1


def test_a_rank_that_waits_looks_whether_the_run_has_failed():
    def look():
        raise PeerLeftError("rank 0 has left")

    assert refused(place(free_port(), 1), look=look) == "rank 0 has left"


def test_the_environment_says_where(monkeypatch):
    for name, value in {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    found = master_address(Launch(rank=0, world_size=4, local_rank=0, local_size=4))
    assert found == MasterAddress("node1", 29500, 0, 4)
    assert (str(found), found.hosts) == ("node1:29500", True)
    # torch's launcher runs the store itself.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not master_address(Launch(0, 4, 0, 4)).hosts
