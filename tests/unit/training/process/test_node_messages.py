"""Messages between the ranks of a host."""

import os
import threading
import time
from dataclasses import replace

from megatron.training.process.dead_ranks import Peers, this_process
from megatron.training.process.failure import FailureFile
from megatron.training.process.node_messages import NodeMessages
from megatron.training.process.watchdog import Hangs, Watchdog

OWN = this_process(0)
OTHER, GONE = (replace(OWN, rank=rank, started=f"{OWN.started} {rank}") for rank in (1, 2))


def test_a_word_arrives_at_the_others_of_the_host():
    own, other = NodeMessages(OWN, [OTHER, GONE]), NodeMessages(OTHER, [OWN])
    own.send("hang")
    assert other.receive(10) == "hang"
    assert own.receive(0.01) is None
    for _ in range(10_000):  # one that does not read keeps no other
        own.send("hang")


def test_words_of_other_users_are_dropped(monkeypatch):
    own, other = NodeMessages(OWN, [OTHER]), NodeMessages(OTHER, [OWN])
    own.send("failed")
    uid = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: uid + 1)
        assert other.receive(0.05) is None
    own.send("hang")
    assert other.receive(10) == "hang"


def test_a_rank_that_may_not_look_yet_hears_of_a_hang_from_another_of_its_host(tmp_path):
    names = f"{os.getpid()} of this test"
    # Each of 16,384 ranks looks at the disk every three minutes.
    peers = [replace(OWN, rank=rank, started=f"{names} {rank}") for rank in (0, 1)]
    watchdog = Watchdog(FailureFile(str(tmp_path)), rank=1)
    watchdog.arm(Hangs(1e6, tmp_path / "hang", 16_384))
    watchdog.set_peers(Peers(peers), world_size=16_384)
    (tmp_path / "hang").mkdir()
    threading.Thread(target=watchdog._poll, daemon=True).start()
    time.sleep(0.1)
    assert not watchdog._others_hang.is_set()
    NodeMessages(peers[0], [peers[1]]).send("hang")
    assert watchdog._others_hang.wait(10)
    watchdog._ended.set()
