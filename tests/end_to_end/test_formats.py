"""The page of file formats says what is written: files are read by its tables alone."""

import ast
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from checkpoints import spread_network, write_checkpoint
from forked import run_job
from jobs import Corpus, journal
from tiny import tiny_argv, tiny_plan
from tokenizers import ByteLevelBPETokenizer

from megatron.checkpointing.hugging_face.peft import export_adapters
from megatron.checkpointing.lock import hold_lock
from megatron.checkpointing.manifest import read_manifest
from megatron.data.preprocessing.command import read_flags
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.token_files.index_files import DTYPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
TEXTS = [f"def a{i}(): return {i}" for i in range(20)] + ["!" * 300, "#"]
Row = dict[str, str]


def tables(heading: str) -> list[list[Row]]:
    """Return the tables under a heading of the page, rows as {column: text}."""
    text = PAGE.read_text(encoding="utf-8")
    (part,) = re.findall(
        rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE
    )
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", part, re.MULTILINE):
        columns, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        found.append([dict(zip(columns, row, strict=True)) for row in rows])
    return found


def unpacked(rows: Sequence[Row], content: bytes) -> tuple[dict[str, Any], int]:
    """Return what bytes hold by a table of offsets, and where the last entry of it ends."""
    letters = {"u8": "B", "u16": "H", "u64": "Q", "i32": "i", "i64": "q", "char": "s"}
    found: dict[str, Any] = {}
    end = 0
    for row in rows:
        kind, _, count = row["type"].rstrip("]").partition("[")
        offset, number = _sum(row["offset"], found), _sum(count or "1", found)
        assert offset == end, f"a gap in front of {row['name']}"
        values = struct.unpack_from(f"<{number}{letters[kind]}", content, offset)
        end = offset + struct.calcsize(f"<{number}{letters[kind]}")
        found[row["name"]] = list(values) if count and kind != "char" else values[0]
        if re.fullmatch(r"\d+", row["value"]) or row["name"] == "magic":
            printed = row["value"].strip("`")
            expected = printed.encode().decode("unicode_escape").encode("latin1")
            assert found[row["name"]] == (expected if row["name"] == "magic" else int(printed))
    return found, end


def _sum(text: str, known: dict[str, Any]) -> int:
    """Return a sum such as 34 + 4N."""
    total = 0
    for term in text.split(" + "):
        number, letter = re.fullmatch(r"(\d*)([A-Z]?)", term).groups()
        total += int(number or 1) * (known[letter] if letter else 1)
    return total


def nodes(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of everything in a tree of JSON, trees as well as leaves."""
    if path:
        yield path, value
    children = value.items() if isinstance(value, dict) else ()
    children = ((("[]"), child) for child in value) if isinstance(value, list) else children
    for name, child in children:
        yield from nodes(child, (*path, name))


def require_told(rows: Sequence[Row], *trees: Any) -> None:
    """Fail unless a table of keys tells all of some trees of JSON, and nothing else."""
    output = {_path(row["key"]): row["type"] for row in rows}
    seen = set()
    for path, value in (node for tree in trees for node in nodes(tree)):
        match = [row for row in output if _is_at(row, path)]
        if match:
            seen |= {*match}
            kinds = output[match[0]].partition(", if ")[0].split(" or ")
            assert any(_is_a(kind, value) for kind in kinds), f"{path} is {value!r}, no {kinds}"
        else:
            above = [row for row in output if _is_at(row, path[: len(row)])]
            assert any(output[row] in ("object", "list") for row in above) or any(
                _is_at(row[: len(path)], path) for row in output
            ), f"{path} is not on the page"
    missing = {row for row, kind in output.items() if row not in seen and ", if " not in kind}
    assert not missing, f"{missing}: on the page and not in the file"


def _path(key: str) -> tuple[str, ...]:
    return tuple(key.strip("`").replace("[]", ".[]").split("."))


def _is_at(row: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a row of the page stands for the path; a word in capitals stands for any."""
    return len(row) == len(path) and all(
        name == word or name.isupper() for name, word in zip(row, path, strict=True)
    )


def _is_a(kind: str, value: Any) -> bool:
    kinds: dict[str, Any] = {
        "text": str,
        "truth": bool,
        "integer": int,
        "number": (int, float),
        "list": list,
        "object": dict,
        "null": type(None),
    }
    return isinstance(value, kinds[kind]) and (kind == "truth" or not isinstance(value, bool))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """Token files of both kinds, and what two runs on them leave."""
    folder = tmp_path_factory.mktemp("formats")
    lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text("".join(lines))
    for kind in ("mmap", "cached"):
        words = ["--input", f"{folder}/texts.jsonl", "--output-prefix", f"{folder}/{kind}"]
        words += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--dataset-impl", kind]
        words += ["--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file]
        preprocess(read_flags(words, description="").spec)
    flags = [
        *("--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file),
        *("--data-cache-path", f"{folder}/cache", "--split", "80,20,0"),
        *("--train-iters", "6", "--save-interval", "2", "--log-interval", "2"),
        *("--eval-interval", "3", "--eval-iters", "1", "--device", "cpu"),
    ]
    blend = ["--data-path", "0.5", f"{folder}/mmap_text_document", "0.5", corpus.prefix]
    run_job(
        tiny_argv(
            *(*flags, *blend, "--save", f"{folder}/calm", "--pipeline-model-parallel-size", "2"),
            *("--zero-stage", "1", "--bf16", "--slow-rank-factor", "100"),
            without=("--data-path", "--train-iters"),
        ),
        folder / "calm",
        ranks=4,
    ).succeeded()
    run_job(
        tiny_argv(
            *(*flags, *blend, "--save", f"{folder}/wild", "--zero-stage", "3"),
            *("--spike-policy", "zscore=0,norm=0.01,window=2,max=1"),
            *("--chaos", "seed=1,stall=1,stall_s=0.01", "--load", f"{folder}/wild"),
            without=("--data-path", "--train-iters"),
        ),
        folder / "wild",
    )
    return folder


@pytest.mark.parametrize("kind", ["mmap", "cached"])
def test_token_files(folder: Path, corpus: Corpus, kind: str) -> None:
    (rows,) = tables("The index of mmap" if kind == "mmap" else "The index of lazy and cached")
    idx = (folder / f"{kind}_text_document.idx").read_bytes()
    found, end = unpacked(rows, idx)
    assert end == len(idx)
    (codes,) = tables("Types of tokens")
    (name,) = (row["type"] for row in codes if int(row["code"]) == found["code"])
    tokens = np.frombuffer((folder / f"{kind}_text_document.bin").read_bytes(), name)
    starts = found["starts"] if "starts" in found else found["pointers"]
    if "pointers" in found:
        starts = [byte // tokens.itemsize for byte in starts]
    else:
        assert found["itemsize"] == tokens.itemsize
        assert found["dimensions"] == list(range(found["N"] + 1))
    read = [
        tokens[start : start + size].tolist()
        for start, size in zip(starts, found["sizes"], strict=False)
    ]
    tokenizer = ByteLevelBPETokenizer(corpus.vocab_file, corpus.merge_file)
    end_of_document = tokenizer.token_to_id("<|endoftext|>")
    assert read == [[*tokenizer.encode(text).ids, end_of_document] for text in TEXTS]
    assert found["documents"] == list(range(len(TEXTS) + 1))


@pytest.mark.parametrize("kind", ["mmap", "cached"])
def test_digests_of_token_files(folder: Path, kind: str) -> None:
    (rows,) = tables("PREFIX.bin.xxh3")
    tokens = (folder / f"{kind}_text_document.bin").read_bytes()
    content = (folder / f"{kind}_text_document.bin.xxh3").read_bytes()
    *header, digests = rows
    found, end = unpacked(header, content)
    assert (found["length"], int(digests["offset"])) == (len(tokens), end)
    assert found["digest"] == xxhash.xxh3_64_intdigest(content[end:])
    blocks = [tokens[i : i + found["block"]] for i in range(0, len(tokens), found["block"])]
    values = struct.unpack(f"<{len(blocks)}Q", content[end:])
    assert list(values) == [xxhash.xxh3_64_intdigest(block) for block in blocks]


def test_types_of_tokens_are_those_that_are_read() -> None:
    (rows,) = tables("Types of tokens")
    assert {int(row["code"]): np.dtype(row["type"]) for row in rows} == DTYPES


def test_records_beside_token_files(folder: Path) -> None:
    (rows,) = tables("PREFIX.tokenizer.json")
    record = json.loads((folder / "mmap_text_document.tokenizer.json").read_text())
    require_told(rows, record)
    names = ("vocab_size", "special", "rules_sha256", "probe", "tokens")
    content = json.dumps({name: record[name] for name in names}, sort_keys=True)
    assert record["fingerprint"] == hashlib.sha256(content.encode()).hexdigest()
    (rows,) = tables("PREFIX.report.json")
    require_told(rows, json.loads((folder / "mmap.report.json").read_text()))


def test_index_maps(folder: Path) -> None:
    header, files, sizes = tables("Index maps")
    maps = {row["file"].strip("`").partition("-")[2]: row for row in files}
    seen = set()
    for file in (folder / "cache").iterdir():
        key, _, name = file.name.partition("-")
        assert re.fullmatch("[0-9a-f]{32}", key)
        if name == "sizes.json":
            require_told(sizes, json.loads(file.read_text()))
            continue
        if file.suffix == ".xxh3":
            rows = np.load(file.with_suffix(".npy"))
            blocks = (rows[i : i + 16384].tobytes() for i in range(0, len(rows), 16384))
            assert file.read_bytes() == b"".join(
                xxhash.xxh3_64_digest(block)[::-1] for block in blocks
            )
            continue
        content = file.read_bytes()
        found, end = unpacked(header, content)
        assert end % 64 == 0
        printed = ast.literal_eval(found["header"].decode())
        kind, shape = maps[name]["type"][:2], maps[name]["shape"]
        assert (printed["descr"], printed["fortran_order"]) == (f"<{kind}", False)
        assert len(printed["shape"]) == len([each for each in shape.split(",") if each.strip(" )")])
        values = np.frombuffer(content[end:], printed["descr"]).reshape(printed["shape"])
        np.testing.assert_array_equal(values, np.load(file))
        seen.add(name)
    assert seen == {*maps}


def test_files_of_checkpoints(folder: Path) -> None:
    (rows,) = tables("Checkpoints")
    (folder / "calm" / "global_step6" / "keep").touch()
    patterns = {row["file"].strip("`"): row["holds"] for row in rows}
    seen = set()
    for run in ("calm", "wild"):
        newest = folder / run / (folder / run / "latest").read_bytes().decode()
        for file in newest.iterdir():
            (pattern,) = (each for each in patterns if re.fullmatch(_as_regex(each), file.name))
            seen.add(pattern)
            if file.suffix == ".pt":
                state = torch.load(file, weights_only=False)
                assert set(re.findall(r"`(\w+)`", patterns[pattern])) <= {*state}
    assert seen == {*patterns}


def _as_regex(pattern: str) -> str:
    named = pattern.replace("PRECISION", "(bf16_)?")
    return re.sub(r"(?<=_)(LL|TT|XX|D|RRRRR)(?![A-Z])", r"\\d+", named)


def test_manifest(folder: Path) -> None:
    (rows,) = tables("manifest.json")
    for run in ("calm", "wild"):
        checkpoint = folder / run / (folder / run / "latest").read_text()
        text = (checkpoint / "manifest.json").read_bytes()
        content = json.loads(text)
        require_told(rows, content)
        seal = content["sha256"].encode()
        assert text.startswith(b'{\n "sha256": "' + seal + b'",\n')
        assert hashlib.sha256(text.replace(seal, b"", 1)).hexdigest().encode() == seal
        named = {record["name"] for record in content["files"]}
        assert named == {f.name for f in checkpoint.iterdir()} - {"manifest.json", "keep"}
        for record in content["files"]:
            content = (checkpoint / record["name"]).read_bytes()
            assert record["size"] == len(content)
            assert record["hash"] == "xxh3_128:" + xxhash.xxh3_128(content).hexdigest()


def test_lock(tmp_path: Path) -> None:
    (rows,) = tables("latest and lock.json")
    with hold_lock(tmp_path):
        require_told(rows, json.loads((tmp_path / "lock.json").read_text()))


def test_journal(folder: Path) -> None:
    (rows,) = tables("journal.jsonl")
    lines = [
        json.loads(line)
        for run in ("calm", "wild")
        for line in (folder / run / "journal.jsonl").read_text().splitlines()
    ]
    events = {event for row in rows for event in row["event"].split(", ")} - {"all"}
    assert {line["event"] for line in lines} == events
    for event in sorted(events):
        own = [row for row in rows if {event, "all"} & {*row["event"].split(", ")}]
        require_told(own, *(line for line in lines if line["event"] == event))


def test_each_rank_has_its_times_and_is_compared_with_its_stage(folder: Path) -> None:
    records, lines = (journal(folder / "calm", event) for event in ("ranks", "train"))
    assert [record["iteration"] for record in records] == [2, 4, 6]
    for record, line in zip(records, lines, strict=True):
        # Both stages load micro-batches (tokens, labels) and compute.
        data, forward = record["data_ms"], record["forward_ms"]
        assert len(data) == len(forward) == 4 and min(*data, *forward) > 0
        assert [*record["hosts"].values()] == [[0, 1, 2, 3]]
        busy = [a + b for a, b in zip(data, forward, strict=True)]
        # Ranks 0 and 1 have the first stage.
        times = [busy[rank] / busy[rank ^ 1] for rank in range(4)]
        assert record["slowest"] == line["slowest_rank"]
        for output in (times[record["slowest"]], record["slowness"], line["times_the_median"]):
            assert output == pytest.approx(max(times), rel=0.1)


def test_failure(folder: Path) -> None:
    (rows,) = tables("failure.json")
    require_told(rows, json.loads((folder / "wild" / "failure.json").read_text()))


def test_adapters(group: Any, tmp_path: Path) -> None:
    lora = ("--lora-rank", "2")
    model = spread_network(tiny_plan(*lora).model, group)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    folder = write_checkpoint(tmp_path / "tuned", weights, *lora)
    export_adapters(folder, read_manifest(folder), tmp_path / "adapters", base="base")
    layout, config = tables("Adapters for PEFT")
    require_told(config, json.loads((tmp_path / "adapters" / "adapter_config.json").read_text()))
    content = (tmp_path / "adapters" / "adapter_model.safetensors").read_bytes()
    found, end = unpacked(layout, content)
    tensors = json.loads(found["header"])
    assert tensors.pop("__metadata__") == {"format": "pt"}
    shapes = {"lora_A": [2, 8], "lora_B": [24, 2]}
    assert len(tensors) == 4
    for name, output in tensors.items():
        module, kind, _ = name.rsplit(".", 2)
        assert module.startswith("base_model.model.")
        assert (output["dtype"], output["shape"]) == ("F32", shapes[kind])
        first, last = output["data_offsets"]
        values = np.frombuffer(content[end + first : end + last], "<f4").reshape(output["shape"])
        number = int(re.search(r"\.h\.(\d+)\.", name)[1])
        own = [w for n, w in weights.items() if n.endswith(f"{kind}.weight") or kind in n]
        np.testing.assert_array_equal(values, own[number].float().numpy())
