"""From data sets as they are published to token files."""

import gzip
import importlib.util
import json
import lzma
from pathlib import Path

import pytest
from problems import problem
from tokenizers import pre_tokenizers

from megatron.common.errors import DataError, MegatronError
from megatron.data.preprocessing import preprocess
from megatron.data.token_files.indexed_dataset import IndexedDataset

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TOOL = Path(__file__).resolve().parents[3] / "tools" / "corpora" / "published.py"
TEXTS = ["The first one.", "A second one.", "The third."]
CARD = """---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: sample
  data_files: data/test-*
---
# A data set
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    return tmp_path


def convert(*flags):
    """Run the tool; return the texts of the token files it printed, and its report."""
    spec = importlib.util.spec_from_file_location("published_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", *files]
    module.main([*map(str, flags), "--output-prefix", "out", *tokenizer])
    report = json.loads(Path("out.corpus.json").read_text())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    (prefix,) = [each["prefix"] for each in report["token_files"]]
    dataset = IndexedDataset(prefix)
    texts = ["".join(letters[token] for token in row) for row in dataset]
    return [text.replace("Ġ", " ") for text in texts], report


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def with_texts(key, *metadata):
    return [{key: text, **more} for text, more in zip(TEXTS, metadata, strict=True)]


PILE = with_texts(
    "text", *({"meta": {"pile_set_name": name}} for name in ("Github", "Pile-CC", "ArXiv"))
)
OSCAR = with_texts(
    "content",
    *(
        {
            "warc_headers": {"warc-date": "2022-11-26T11:45:35Z"},
            "metadata": {"identification": {"label": "en"}, "quality_warnings": warnings},
        }
        for warnings in (None, ["tiny", "noisy"], None)
    ),
)
SLIM = with_texts("text", *({"meta": {"redpajama_set_name": f"RedPajama{i}"}} for i in range(3)))
DOLMA = with_texts("text", *({"id": str(i), "source": "s", "metadata": {}} for i in range(3)))
C4 = with_texts("text", *({"timestamp": "2019-04-25T12:57:54Z", "url": "u"} for _ in range(3)))
CODE = with_texts(
    "content", *({"repo_name": "r", "license": name} for name in ("mit", "gpl", "mit"))
)
SHARDS = {
    "the Pile": ("00.jsonl.zst", PILE, zstandard.compress, (), TEXTS),
    "subsets of the Pile": (
        "00.jsonl.zst",
        PILE,
        zstandard.compress,
        ("--where", "meta.pile_set_name", "ArXiv", "Github"),
        [TEXTS[0], TEXTS[2]],
    ),
    "SlimPajama": ("c.jsonl.zst", SLIM, zstandard.compress, (), TEXTS),
    "Dolma": ("c4-0000.json.gz", DOLMA, gzip.compress, (), TEXTS),
    "C4": ("c4-train.00000-of-01024.json.gz", C4, gzip.compress, (), TEXTS),
    "OSCAR's first format": (
        "oscar.jsonl.xz",
        [{"id": i, "text": text} for i, text in enumerate(TEXTS)],
        lzma.compress,
        (),
        TEXTS,
    ),
    "OSCAR": (
        "en_meta_part_1.jsonl.zst",
        OSCAR,
        zstandard.compress,
        ("--where", "metadata.quality_warnings", "null"),
        [TEXTS[0], TEXTS[2]],
    ),
    "a warning of OSCAR": (
        "en_meta_part_1.jsonl.zst",
        OSCAR,
        zstandard.compress,
        ("--where", "metadata.quality_warnings", "noisy"),
        [TEXTS[1]],
    ),
    "CodeParrot": (
        "file-000000000001.json.gz",
        CODE,
        gzip.compress,
        ("--where", "license", "mit", "apache-2.0"),
        [TEXTS[0], TEXTS[2]],
    ),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_become_token_files(folder, name):
    file, records, compress, flags, expected = SHARDS[name]
    (folder / file).write_bytes(compress(lines(records)))
    texts, report = convert("--input", file, "--licence", "as stated", *flags)
    assert texts == expected
    assert report["source"] == {
        "input": [file],
        "files": 1,
        "bytes": (folder / file).stat().st_size,
        "date": report["source"]["date"],
        "licence": "as stated",
    }
    key = "content" if "content" in records[0] else "text"
    assert report["token_files"][0]["prefix"] == f"out_{key}_document"
    assert report["documents"] == {
        "read": 3,
        "left out by --where": 3 - len(expected),
        "bad": 0,
        "without a token": 0,
        "written": len(expected),
    }


@pytest.mark.parametrize("meta", ["struct", "JSON"])
def test_a_table_is_selected_by_its_metadata(folder, meta):
    found = [record["meta"] for record in PILE]
    column = found if meta == "struct" else list(map(json.dumps, found))
    score = [0.5, 0.5, 0.25]
    table = pyarrow.table({"text": TEXTS, "meta": column, "language_score": score})
    parquet.write_table(table, folder / "000_00000.parquet", row_group_size=1)
    texts, _ = convert("--input", "*.parquet", "--where", "meta.pile_set_name", "Github", "ArXiv")
    assert texts == [TEXTS[0], TEXTS[2]]
    texts, _ = convert("--input", "*.parquet", "--where", "language_score", "0.5")
    assert texts == TEXTS[:2]
    with problem("--where lang … 000_00000.parquet … column", DataError):
        convert("--input", "*.parquet", "--where", "lang", "en")


def save(folder, texts, licence=""):
    """Write a data set as save_to_disk does: a file of Arrow's stream format for each two texts."""
    folder.mkdir(parents=True)
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for i, name in enumerate(names):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table[2 * i : 2 * i + 2], max_chunksize=1)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"license": licence}))


def test_a_folder_of_save_to_disk(folder, capsys):
    save(folder / "saved", TEXTS, "cc-by-4.0")
    texts, report = convert("--input", "saved", "--date", "2026-01")
    assert texts == TEXTS
    assert report["source"] == {
        "input": ["saved"],
        "split": "train",
        "files": 2,
        "bytes": sum(path.stat().st_size for path in (folder / "saved").glob("*.arrow")),
        "date": "2026-01",
        "licence": "cc-by-4.0",
    }
    save(folder / "splits" / "train", TEXTS[:1])
    save(folder / "splits" / "test", TEXTS[1:])
    (folder / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert convert("--input", "splits")[0] == TEXTS[:1]
    assert "warning: no licence is known" in capsys.readouterr().out
    assert convert("--input", "splits", "--split-name", "test")[0] == TEXTS[1:]
    with problem("--split-name dev … train, test"):
        convert("--input", "splits", "--split-name", "dev")


def test_a_folder_of_the_hub(folder, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    revision = "0123456789" * 4
    snapshot = folder / "datasets--a--b" / "snapshots" / revision
    (snapshot / "data").mkdir(parents=True)
    (snapshot / "README.md").write_text(CARD)
    for i, name in enumerate(
        ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
    ):
        blob = folder / f"blob{2 - i}"
        parquet.write_table(pyarrow.table({"text": [TEXTS[i]]}), blob)
        (snapshot / "data" / f"{name}.parquet").symlink_to(blob)
    texts, report = convert("--input", snapshot)
    assert texts == TEXTS[:2]
    described = {key: report["source"][key] for key in ("split", "licence", "revision", "files")}
    assert described == {"split": "train", "licence": "odc-by", "revision": revision, "files": 2}
    assert convert("--input", snapshot, "--split-name", "test")[0] == TEXTS[2:]
    assert convert("--input", snapshot, "--config-name", "sample")[0] == TEXTS[2:]
    with problem("--config-name other … default, sample"):
        convert("--input", snapshot, "--config-name", "other")
    (snapshot / "README.md").write_text(CARD.replace("name: default", "name: full"))
    with problem("--config-name … full, sample"):
        convert("--input", snapshot)

    local = folder / "local"  # as the hub's tools fill a folder, without a card
    (local / "train").mkdir(parents=True)
    (local / "train" / "00.jsonl.zst").write_bytes(zstandard.compress(lines(PILE)))
    (local / ".cache" / "huggingface" / "download").mkdir(parents=True)
    metadata = local / ".cache" / "huggingface" / "download" / "00.jsonl.zst.metadata"
    metadata.write_text(f"{revision}\nabc\n1700000000.0\n")
    texts, report = convert("--input", local, "--licence", "mit")
    assert (texts, report["source"]["revision"], report["source"]["licence"]) == (
        TEXTS,
        revision,
        "mit",
    )


def test_an_interrupted_run_continues(folder, monkeypatch, capsys):
    (folder / "a.jsonl").write_bytes(lines(PILE))

    def killed(*_, **__):
        raise RuntimeError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(preprocess, "assemble", killed)
        with pytest.raises(RuntimeError, match="killed here"):
            convert("--input", "a.jsonl")
    assert not (folder / "out.corpus.json").exists()
    assert convert("--input", "a.jsonl")[0] == TEXTS
    assert "skips 1 finished shards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("records", "flags", "reported"),
    [
        (PILE, ["--where", "meta.pile_set_name", "ArXive"], "3 documents … a.jsonl"),
        (PILE, ["--where", "meta.pile_set_name"], "--where meta.pile_set_name … key"),
        ([{"body": "x"}], [], "a.jsonl … text, content, raw_content … body"),
        ([{"text": ""}], [], "1 documents … a.jsonl … token"),
        ([{"text": 7}], [], "a.jsonl, line 1 … 'text' … 7"),
        (PILE, ["--config-name", "x"], "--config-name x … --input … folder"),
    ],
)
def test_problems_are_reported(folder, records, flags, reported):
    (folder / "a.jsonl").write_bytes(lines(records))
    with problem(reported, MegatronError):
        convert("--input", "a.jsonl", *flags)
    assert not (folder / "out.corpus.json").exists()
