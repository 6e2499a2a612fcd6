"""What a conversion says about its documents, against counting in plain Python."""

import json
from dataclasses import asdict
from itertools import groupby, pairwise
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from bytes_tokenizer import BytesTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.preprocessing import quality, report
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.quality import (
    PERCENTILES,
    Lengths,
    LongRuns,
    Repetition,
    Tally,
    hash_documents,
    runs_longer_than,
)
from megatron.data.preprocessing.report import count_repeated

DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=5), max_size=8
)


def flat(documents):
    tokens = np.array([token for document in documents for token in document], "<u2")
    return tokens, np.cumsum([len(document) for document in documents], dtype=np.int64)


@given(DOCUMENTS)
@settings(max_examples=100, deadline=None)
def test_runs_are_those_of_counting_one_by_one(described):
    documents = [[t for token, count in runs for t in [token] * count] for runs in described]
    expected = [
        Repetition(len(list(run)), token, i)
        for i, document in enumerate(documents)
        for token, run in groupby(document)
    ]
    expected.sort(key=lambda run: -run.length)
    for length in (15, 16, 23, 24, 40):
        assert runs_longer_than(length, *flat(documents)) == [
            run for run in expected if run.length > length
        ]


@given(st.lists(DOCUMENTS, max_size=6))
@settings(max_examples=100, deadline=None)
def test_runs_that_come_in_pieces_are_those_of_all_tokens(described):
    pieces = [
        [[t for token, count in runs for t in [token] * count] for runs in documents]
        for documents in described
    ]
    long_runs, tally, num_before = LongRuns(), Tally(), 0
    for documents in pieces:
        tally.add(Tally(runs=long_runs(*flat(documents))), num_before)
        num_before += len(documents)
    full = flat([document for documents in pieces for document in documents])
    assert tally.runs == runs_longer_than(quality.SHORTEST_RUN - 1, *full)[:10]


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=20))
@settings(max_examples=100, deadline=None)
def test_equal_documents_have_equal_hashes_wherever_they_stand(documents):
    together = hash_documents(*flat(documents)).tolist()
    alone = [int(hash_documents(*flat([document]))[0]) for document in documents]
    assert together == alone
    assert len(set(together)) == len({tuple(document) for document in documents})


def test_a_million_different_documents_have_different_hashes():
    tokens = np.arange(2_000_000, dtype="<i4") // np.array([1, 7] * 1_000_000)
    pairs = tokens.reshape(-1, 2)
    hashes = hash_documents(tokens, np.arange(2, 2_000_001, 2, dtype=np.int64))
    assert len(np.unique(hashes)) == len(np.unique(pairs, axis=0))


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 26])
def test_copies_are_counted_in_any_number_of_buckets(tmp_path, bucket_bytes):
    values = np.random.default_rng(0).integers(0, 40, 90).astype("<u8")
    values[:50].tofile(tmp_path / "a")
    values[50:].tofile(tmp_path / "b")
    expected = 90 - len(set(values.tolist()))
    paths = [tmp_path / "a", tmp_path / "b"]
    assert count_repeated(paths, tmp_path, bucket_bytes=bucket_bytes) == expected
    assert len(list(tmp_path.iterdir())) == 2


@given(st.lists(st.integers(0, 60), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_percentiles_are_exact(sizes):
    counted = Lengths(exact_below=30)
    for piece in (sizes[:7], sizes[7:]):
        counted.add(np.array(piece, np.int64))
    content = counted.summary()
    ordered = sorted(sizes)
    for percent in PERCENTILES:
        assert content[f"p{percent}"] == ordered[-(-len(sizes) * percent // 100) - 1]
    assert (content["min"], content["max"]) == (ordered[0], ordered[-1])
    assert counted.count(10, 40) == sum(10 <= size <= 40 for size in sizes)


def test_tallies_add_up_and_survive_being_saved():
    total = Tally()
    total.add(Tally(1, [Repetition(20, 7, 0)], 2, 1, ["x"]), 0)
    total.add(Tally(2, [Repetition(30, 8, 1)], 3, 0, []), 10)
    assert total == Tally(3, [Repetition(30, 8, 11), Repetition(20, 7, 0)], 5, 1, ["x"])
    assert Tally.from_json(json.loads(json.dumps(asdict(total)))) == total


class Lossy(BytesTokenizer):
    """Turns everything into small letters; z is unknown, and y and a stand for themselves."""

    special_ids = MappingProxyType({"eod": 256, "unk": ord("z")})

    def encode(self, text):
        return super().encode(text.lower())

    def vocabulary(self):
        texts = {ord("a"): "\xe4", ord("b"): "b", ord("y"): "<0x79>"}
        return SimpleNamespace(tokens=[texts.get(i, "") for i in range(257)])

    def decode(self, ids):
        return "".join("\ufffd" if i == ord("a") else chr(i) for i in ids)


@pytest.mark.parametrize("how", [{}, {"workers": 2, "shard_bytes": 200}, {"shard_bytes": 300}])
def test_the_report_lists_odd_documents(tmp_path, how):
    texts = ["abc", "Abc", "abc", "", "zzyy", "\\" * 50, "def"]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (written,) = preprocess(
        PreprocessSpec(
            inputs=(str(tmp_path / "a.jsonl"),),
            output_prefix=str(tmp_path / "out"),
            make_encoder=Lossy,
            append_eod=True,
            empty_documents="keep",
            **how,
        )
    )
    content = json.loads((tmp_path / "out.report.json").read_text())
    text = content["keys"]["text"]
    assert (content["documents"], text["documents"], text["tokens"]) == (7, 7, 73)
    assert (text["empty_documents"], text["repeated_documents"]) == (1, 2)
    assert text["longest_runs"] == [{"tokens": 50, "token": 92, "document": 5}]
    assert text["unknown_or_byte_tokens"] == 4 + 3
    assert text["tokens_per_document"]["max"] == 51
    assert (text["decoded_again"], text["changed_by_decoding"]) == (6, 1)
    assert text["changed_examples"] == ["Abc"]
    assert any("longest run of one token: 50 times 92" in line for line in written.report)


@pytest.mark.parametrize(("one_in", "expected"), [(1, 300), (7, None), (10**9, 100)])
def test_the_first_documents_and_some_of_the_others_are_decoded_once(
    tmp_path, sample_one_in, one_in, expected
):
    sample_one_in(one_in)
    texts = [f"text {i}" for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokens = np.frombuffer("".join(texts).encode(), "u1").astype("<u2")
    hashes = hash_documents(tokens, np.cumsum([len(text) for text in texts]))
    chosen = {i for i, one in enumerate(hashes.tolist()) if one % one_in == 0}
    conversion = PreprocessSpec(
        inputs=(str(tmp_path / "a.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        make_encoder=BytesTokenizer,
    )
    preprocess(conversion)
    content = json.loads((tmp_path / "out.report.json").read_text())["keys"]["text"]
    assert content["decoded_again"] == len(chosen | set(range(report.FIRST_DOCUMENTS)))
    assert expected in (None, content["decoded_again"])


def test_a_long_document_is_not_decoded_again(tmp_path, sample_one_in, monkeypatch):
    sample_one_in(1)
    monkeypatch.setattr("megatron.data.preprocessing.block_encoder.MOST_CHARS", 5)
    lines = [json.dumps({"text": text}) + "\n" for text in ("abc", "abcde", "abcdef", "x" * 99)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    inputs, prefix = (str(tmp_path / "a.jsonl"),), str(tmp_path / "out")
    preprocess(PreprocessSpec(inputs=inputs, output_prefix=prefix, make_encoder=BytesTokenizer))
    content = json.loads((tmp_path / "out.report.json").read_text())["keys"]["text"]
    assert content["decoded_again"] == 2


def test_percentiles_are_in_order():
    assert all(a < b for a, b in pairwise(PERCENTILES))
