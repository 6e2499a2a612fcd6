"""Worker processes, beside one another on the cores of one machine."""

import json
import os

import pytest
from bytes_tokenizer import BytesTokenizer

from megatron.data.conversion import Conversion
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import preprocess


class Threads(BytesTokenizer):
    """A text is the number of threads that the tokenizers library would start."""

    def encode(self, text):
        return [int(os.environ["RAYON_NUM_THREADS"])]


@pytest.mark.parametrize(("workers", "partitions", "threads"), [(2, 1, 6), (2, 2, 3), (1, 2, 6)])
def test_the_processes_of_a_conversion_share_the_threads(
    tmp_path, monkeypatch, workers, partitions, threads
):
    monkeypatch.setenv("RAYON_NUM_THREADS", "12")
    (tmp_path / "in.jsonl").write_text(4 * (json.dumps({"text": "a"}) + "\n"))
    wishes = Conversion(
        inputs=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        make_encoder=Threads,
        workers=workers,
        partitions=partitions,
    )
    (written,) = preprocess(wishes)
    assert IndexedDataset(written.prefix).tokens.tolist() == [threads] * 4
