"""Processes of one launch that find each other, and are not misled by those of another."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from bytes_tokenizer import BytesTokenizer

from megatron.common.errors import DataError
from megatron.data.preprocessing.file_rendezvous import meet, say_done
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import Conversion
from megatron.data.preprocessing.shards import convert_together, stage_shard


def test_a_shard_of_an_earlier_launch_does_not_count_as_done(tmp_path):
    """Its rank 0 died; of the next launch rank 1 comes late."""
    lines = [json.dumps({"text": "x" * (i % 31)}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    root = tmp_path / "out.stage"
    earlier = Conversion(
        inputs=(str(tmp_path / "a.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
    )
    with ThreadPoolExecutor(3) as threads:
        died = threads.submit(meet, root, 0, 2, 30)
        launch = threads.submit(meet, root, 1, 2, 30).result()
        assert died.result() == launch
        stage_shard(earlier, 1, 2)
        say_done(root, 1, launch)

        anew, how = replace(earlier, append_eod=True), {"timeout_s": 30, "merge_workers": 1}
        rank_0 = threads.submit(convert_together, anew, 0, 2, **how)
        time.sleep(0.5)
        assert not rank_0.done()
        rank_1 = threads.submit(convert_together, anew, 1, 2, **how)
        assert rank_1.result() == []
        (written,) = rank_0.result()
    assert (written.documents, written.dropped) == (290, 10)
    preprocess(replace(anew, output_prefix=str(tmp_path / "whole")))
    for end in (".bin", ".idx"):
        whole = (tmp_path / f"whole_text_document{end}").read_bytes()
        assert (tmp_path / f"out_text_document{end}").read_bytes() == whole
    assert not root.exists()


def test_a_rank_that_comes_first_waits_for_rank_0_of_its_own_launch(tmp_path):
    root = tmp_path / "out.stage"
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(meet, root, rank, 3, 30) for rank in (2, 0, 1)]
        earlier = {each.result() for each in first}
        later = [threads.submit(meet, root, rank, 3, 30) for rank in (1, 2)]
        time.sleep(0.5)
        assert not any(each.done() for each in later)
        later.append(threads.submit(meet, root, 0, 3, 30))
        assert len({each.result() for each in later} | earlier) == 2


def test_ranks_that_do_not_come_are_named(tmp_path):
    root = tmp_path / "out.stage"
    with pytest.raises(DataError, match="rank 0 has not come, and nothing has happened there for"):
        meet(root, 1, 3, timeout_s=0.1)
    with pytest.raises(DataError, match="ranks 1, 2 of 3 have not come, and nothing"):
        meet(root, 0, 3, timeout_s=0.1)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet, root, 0, 2, 30)
        time.sleep(0.1)
        with pytest.raises(DataError, match="ranks 1 of 2 have not come"):
            meet(root, 0, 2, timeout_s=0.5)
        with pytest.raises(DataError, match="another launch works in"):
            first.result()
