"""Ranks of one launch wait for each other, and are not misled by files of other launches."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bytes_tokenizer import BytesTokenizer
from problems import problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.distributed import Launch, preprocess_on_ranks
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec


def test_shards_of_an_earlier_launch_do_not_count_as_done(tmp_path):
    """Its rank 0 died; of the next launch, with other options, rank 1 comes late."""
    lines = [json.dumps({"text": "x" * (i % 31)}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    earlier = PreprocessSpec(
        inputs=(str(tmp_path / "a.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
        shard_bytes=1000,
    )
    how = {"timeout_s": 30, "merge_workers": 1}
    with ThreadPoolExecutor(3) as threads:
        died = threads.submit(Launch, earlier.staging, 0, 2, 30)
        assert preprocess_on_ranks(earlier, 1, 2, **how) == []
        died.result()

        anew = replace(earlier, append_eod=True)
        rank_0 = threads.submit(preprocess_on_ranks, anew, 0, 2, **how)
        time.sleep(0.5)
        assert not rank_0.done()
        rank_1 = threads.submit(preprocess_on_ranks, anew, 1, 2, **how)
        assert rank_1.result() == []
        (written,) = rank_0.result()
    assert (written.documents, written.dropped) == (290, 10)
    preprocess(replace(anew, output_prefix=str(tmp_path / "whole")))
    for end in (".bin", ".idx"):
        full = (tmp_path / f"whole_text_document{end}").read_bytes()
        assert (tmp_path / f"out_text_document{end}").read_bytes() == full
    assert not earlier.staging.exists()


def test_a_rank_that_comes_first_waits_for_rank_0_of_its_own_launch(tmp_path):
    for _ in range(2):  # and files of the first launch do not mislead the second
        with ThreadPoolExecutor(3) as threads:
            others = [threads.submit(Launch, tmp_path, rank, 3, 30) for rank in (1, 2)]
            time.sleep(0.5)
            assert not any(each.done() for each in others)
            for each in (*others, threads.submit(Launch, tmp_path, 0, 3, 30)):
                each.result()


def test_ranks_that_do_not_come_are_named(tmp_path):
    with problem("rank 0 … not started … --timeout-s … --resume", DataError):
        Launch(tmp_path, 1, 3, timeout_s=0.1)
    with problem("ranks 1, 2 of 3 … not started … --resume", DataError):
        Launch(tmp_path, 0, 3, timeout_s=0.1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Launch, tmp_path, 0, 2, 30)
        time.sleep(0.1)
        with problem("ranks 1 of 2 … not started", DataError):
            Launch(tmp_path, 0, 2, timeout_s=0.5)
        with problem("another launch … --output-prefix", DataError):
            first.result()
