"""One document of millions of characters has the ids of the reference, in bounded memory."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import _MEMORY_PER_TEXT, PreprocessSpec
from megatron.data.token_files.indexed_dataset import IndexedDataset
from megatron.tokenizer.types.adversarial import adversarial_texts
from megatron.tokenizer.types.fast import FastTokenizer
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer

pytest.importorskip("gigatoken")

NUM_BYTES = 3_000_000
SLACK_BYTES = 20_000_000  # what the rest of the process may take meanwhile


def huge_text():
    """Return words, code, scripts, white space and runs without an end, in no order."""
    draw = random.Random(0)
    pieces = [text for text in adversarial_texts() if text]
    text, size = [], 0
    while size < NUM_BYTES:
        words = " ".join(draw.choices(("the", "lobster's", "claws", "1999,", "naïve", "\\n"), k=40))
        text += [words, draw.choice(pieces)]
        size += len(words) + len(text[-1].encode())
    return "".join([*text, "ab" * 100_000, " " * 100_000, "end"])


def memory_bytes(name):
    """Return a line of this process's status: VmRSS, or VmHWM, the most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def test_a_huge_document_has_the_ids_of_the_reference_in_bounded_memory(gpt2_files, tmp_path):
    reference = GPT2BPETokenizer(*gpt2_files)
    fast = FastTokenizer(reference, must_be_fast=True)
    text = huge_text()
    line = json.dumps({"text": text})
    (tmp_path / "in.jsonl").write_text(f'{{"text": "small"}}\n{line}\n{{"text": "last"}}\n')
    fast.encode_array(["so that what is imported on use is there"])
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    (written,) = preprocess(
        PreprocessSpec(
            inputs=(str(tmp_path / "in.jsonl"),),
            output_prefix=str(tmp_path / "out"),
            make_encoder=lambda: fast,
            append_eod=True,
        )
    )
    grown = memory_bytes("VmHWM") - before
    dataset = IndexedDataset(written.prefix)
    expected = np.array([*reference.encode(text), reference.eod])
    assert [dataset[0].tolist(), dataset[2].tolist()] == [
        [*reference.encode(small), reference.eod] for small in ("small", "last")
    ]
    assert np.array_equal(dataset[1], expected)
    assert grown < _MEMORY_PER_TEXT * len(line) + SLACK_BYTES
