"""When a spare process takes the run for ended, and what rank 0 does about it."""

import logging
import socket
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from megatron.tensor_parallel.master_address import MasterAddress
from megatron.training.process import spares


def testrank_0_is_gone_when_it_closes_its_end_or_listens_no_more():
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = MasterAddress("127.0.0.1", server.getsockname()[1], rank=1, world_size=1)
        is_over = spares.rank_0_is_gone(master)
        accepted, _ = server.accept()
        assert not is_over()
        accepted.close()
        assert is_over()
    assert spares.rank_0_is_gone(master)()


@pytest.mark.parametrize("error", [DistNetworkError, DistStoreError])
def test_a_run_that_has_ended_does_not_fail_for_a_store_that_is_gone(error, monkeypatch, caplog):
    def set_key(*words):
        raise error("Connection reset by peer\nException raised from recvBytes")

    master = MasterAddress("node1", 29500, rank=0, world_size=1, is_hosted=True)
    monkeypatch.setattr(spares, "master_address", lambda launch: master)
    monkeypatch.setattr(spares, "set_key", set_key)
    with caplog.at_level(logging.WARNING):
        spares.release_spares(SimpleNamespace())
    (record,) = caplog.records
    assert "(Connection reset by peer): spare processes" in record.getMessage()
