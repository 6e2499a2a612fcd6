"""When a spare process takes the run for ended."""

import socket

from megatron.tensor_parallel.master_address import MasterAddress
from megatron.training.process import spares


def test_rank_0_is_gone_when_it_closes_its_end_or_listens_no_more():
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = MasterAddress("127.0.0.1", server.getsockname()[1], rank=1, world_size=1)
        is_over = spares._rank_0_is_gone(master)
        accepted, _ = server.accept()
        assert not is_over()
        accepted.close()
        assert is_over()
    assert spares._rank_0_is_gone(master)()
