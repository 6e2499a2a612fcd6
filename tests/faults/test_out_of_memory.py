"""One rank that gets no more memory ends all, says why, and costs no step that was saved."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import without_head_start
from small_job import Job, is_same

from megatron.checkpointing.manifest import damage, read_manifest
from megatron.common.errors import ExitCode


def lacks_memory(needs: str, struck: int, rank: int) -> None:
    """Have the rank `struck` need more memory than it may have, in its fourth step."""
    import resource

    import torch

    from megatron.training.loop.batch_stream import Stream

    without_head_start(rank)
    if rank != struck:
        return
    read, count = Stream.__next__, iter(range(1, 1000))

    def read_and_need(stream: Stream) -> Any:
        if next(count) == 4:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            if needs == "a tensor":
                torch.zeros(1 << 30)
            kept = []
            while True:
                kept.append(bytearray(1 << 16))
        return read(stream)

    Stream.__next__ = read_and_need


@pytest.mark.parametrize(
    ("needs", "struck", "output"),
    [("a tensor", 1, "can't allocate memory"), ("many small pieces", 0, "MemoryError")],
)
def test_a_rank_without_memory_ends_all_and_says_so(
    job_of_two: Job, tmp_path: Path, needs: str, struck: int, output: str
) -> None:
    save = tmp_path / "save"
    ended = job_of_two.run(save, setup=partial(lacks_memory, needs, struck))
    assert ended.codes == [ExitCode.FAILED] * 2, "\n".join(ended.outputs)
    record = json.loads((save / "failure.json").read_text())
    assert (record["kind"], record["rank"], record["iteration"]) == ("error", struck, 4)
    assert output in record["message"]
    assert damage(save / "global_step2", read_manifest(save / "global_step2").files) == []
    job_of_two.run(save).succeeded()
    assert is_same(save, job_of_two.save)
