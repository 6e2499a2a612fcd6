"""Objects between ranks: what comes back, and that a stranger's bytes never run."""

import os
import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from problems import problem
from ranks import outcomes_on_ranks, require_passed

from megatron.common.codeless import MessageError, UnsendableError
from megatron.common.errors import WrongDataError
from megatron.engine.deepspeed import distributed
from megatron.tensor_parallel import object_collectives
from megatron.tensor_parallel.object_collectives import (
    agree_on_failure,
    all_gather_objects,
    broadcast_object,
)
from megatron.training.loop import collectives
from megatron.training.loop.collectives import from_rank_0, gather_findings, post, scatter
from megatron.training.process.dead_ranks import Peer

RANKS = 2
OWNED = f"/tmp/owned-by-a-message-{os.getppid()}"


class Trap:
    def __reduce__(self):
        return os.mkdir, (OWNED,)


def other(rank):
    return 1 - rank


def objects_come_back(rank):
    own = [Peer(rank, "host", 1, "x", "y"), ("é", {rank: None}), b"\0" * 50_000 * rank]
    both = all_gather_objects(own)
    assert both[rank] == own
    assert len(both[other(rank)][2]) == 50_000 * other(rank)
    assert post(own[:2]).all() == [each[:2] for each in both]
    assert scatter([Path("a"), Path("b"), Path("c")] if rank == 0 else None) == (
        [Path("a"), Path("c")] if rank == 0 else [Path("b")]
    )
    assert gather_findings([("found", rank)]) == [("found", 0), ("found", 1)]


def an_error_of_rank_0_is_raised_on_all(rank):
    def fail():
        raise WrongDataError("no such file")

    with pytest.raises(WrongDataError, match="no such file"):
        from_rank_0(fail)


def what_cannot_be_sent_is_an_error_on_all_ranks(rank):
    def sends():
        return object() if rank == 0 else "text"

    for collective in (
        lambda: broadcast_object(sends(), source=0),
        lambda: all_gather_objects(sends()),
        lambda: from_rank_0(object),
        lambda: gather_findings([sends()]),
        lambda: scatter([1, object()] if rank == 0 else None),
        lambda: post(sends()),
    ):
        with pytest.raises(UnsendableError):
            collective()
    # No rank has been left behind in one of them.
    assert all_gather_objects(rank) == [0, 1]


def a_pickle_in_the_store_does_not_run(rank):
    posted = post("own")
    distributed.store().set(f"{posted._prefix}/{rank}", pickle.dumps(Trap()))
    collectives.any_rank([False])
    with problem("program … MASTER_ADDR:MASTER_PORT", MessageError):
        posted.of(other(rank))
    # A stranger is faster than the ranks that read.
    with patch.object(collectives, "encode_or_refuse", lambda value: (pickle.dumps(Trap()), None)):
        items = [1, 2] if rank == 0 else None
        with pytest.raises(MessageError):
            scatter(items)
    dist.barrier()
    assert not Path(OWNED).exists()


def a_pickle_from_another_rank_does_not_run(rank):
    with patch.object(
        object_collectives, "encode_or_refuse", lambda _: (pickle.dumps(Trap()), None)
    ):
        with pytest.raises(MessageError):
            all_gather_objects(1)
        if rank == 0:
            broadcast_object(1, source=0)
        else:
            with pytest.raises(MessageError):
                broadcast_object(1, source=0)
    dist.barrier()
    assert not Path(OWNED).exists()


def a_failure_of_one_rank_is_known_on_all(rank):
    assert agree_on_failure(None) is None
    assert agree_on_failure("disk full") == "disk full"
    assert agree_on_failure("disk full" if rank == 1 else None) == "on rank 1: disk full"


CHECKS = [
    a_failure_of_one_rank_is_known_on_all,
    objects_come_back,
    an_error_of_rank_0_is_raised_on_all,
    what_cannot_be_sent_is_an_error_on_all_ranks,
    a_pickle_in_the_store_does_not_run,
    a_pickle_from_another_rank_does_not_run,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(RANKS, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
