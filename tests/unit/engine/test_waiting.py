"""Timeouts of collectives."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.engine.deepspeed.patches.runtime import set_collective_timeout


def waits(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def test_the_timeout_holds_for_groups_made_before_and_after(group):
    other = dist.new_group([dist.get_rank()])
    before = [waits(other), waits(dist.group.WORLD)]
    try:
        set_collective_timeout(timedelta(minutes=7))
        # As DeepSpeed makes them, which says no limit.
        later = dist.new_group([dist.get_rank()])
        limits = [waits(each) for each in (other, dist.group.WORLD, later)]
        assert limits == [timedelta(minutes=7)] * 3
    finally:
        set_collective_timeout(timedelta(minutes=30))
        dist.destroy_process_group(other)
    assert timedelta(minutes=7) not in before
