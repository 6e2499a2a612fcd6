"""The recorder of collectives, in a process group of one rank."""

import pytest
import torch
import torch.distributed as dist
from communication import hidden_share, record_communication

from megatron.tensor_parallel.process_groups import lone_group


def test_a_collective_is_hidden_by_a_product_between_start_and_wait():
    group, x = lone_group(), torch.ones(4, 4)
    with record_communication() as record:
        work = dist.all_reduce(x, group=group, async_op=True)
        _ = x @ x
        work.wait()
        dist.broadcast(x, dist.get_rank(), group=group)
        _ = x @ x
    reduced, broadcast = record.collectives
    assert (reduced.kind, reduced.num_bytes, reduced.is_hidden) == ("all-reduce", 64, True)
    assert (broadcast.kind, broadcast.num_bytes, broadcast.is_hidden) == ("broadcast", 64, False)
    assert record.num_products == 2
    assert hidden_share(record.collectives) == 0.5
    assert hidden_share([]) == 1.0


def test_nothing_is_recorded_outside_of_the_block():
    group, x = lone_group(), torch.ones(2)
    with record_communication() as record:
        dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group)
    dist.broadcast(x, dist.get_rank(), group=group)
    assert len(record.collectives) == 1


def test_collectives_of_a_group_pass_its_network_one_after_the_other(clock):
    group, x = lone_group(), torch.ones(25)
    with record_communication(seconds_per_byte=0.01) as record:
        first = dist.broadcast(x, dist.get_rank(), group=group, async_op=True)
        second = dist.broadcast(x, dist.get_rank(), group=group, async_op=True)
        clock.pass_time(0.75)
        second.wait()
        first.wait()
    assert clock.pauses == pytest.approx([1.25, 0.0])
    assert len(record.collectives) == 2
