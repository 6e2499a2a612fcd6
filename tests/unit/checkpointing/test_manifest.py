"""What makes a checkpoint count."""

import errno
import hashlib
import io
import json
from dataclasses import asdict, replace

import pytest
import xxhash
from problems import problem
from tiny import tiny_config, tiny_plan, tiny_spec

from megatron.checkpointing.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    damage,
    read_manifest,
    record_file,
    seal_json,
    write_manifest,
)
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.common.version import CHECKPOINT_FORMAT
from megatron.config.network.model_spec import flat


@pytest.fixture
def manifest(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"weights")
    (tmp_path / "b.pt").write_bytes(bytes(5_000_000))
    return Manifest(
        state=TrainState(iteration=7, samples=28),
        plan={"model": {"num_layers": 2}, "notices": []},
        config={"model": {"num_layers": 2, "ffn_hidden_size": None}},
        versions={"megatron": "0.1.0"},
        partition_dims={"3.mlp.dense_4h_to_h.weight": 1},
        files=(record_file(tmp_path / "a.pt"), record_file(tmp_path / "b.pt")),
    )


def test_a_manifest_is_read_as_written(tmp_path, manifest):
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert manifest.format == CHECKPOINT_FORMAT


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_manifests_without_the_form_of_sentencepiece_are_of_the_legacy_form(
    tmp_path, manifest, kind
):
    older = {"tokenizer": {"tokenizer_type": kind}}
    write_manifest(tmp_path, replace(manifest, config=older))
    assert read_manifest(tmp_path).tokenizer.tokenizer_sentencepiece_legacy is True
    now = {"tokenizer": {"tokenizer_type": kind, "tokenizer_sentencepiece_legacy": False}}
    write_manifest(tmp_path, replace(manifest, config=now))
    assert read_manifest(tmp_path).config == now


@pytest.mark.parametrize(("objective", "expected"), [("t5", None), ("gpt", 0)])
def test_a_t5_that_recorded_no_sentinels_had_the_default(tmp_path, manifest, objective, expected):
    plan = {**manifest.plan, "objective": {"name": objective}}
    older = {"tokenizer": {"vocab_extra_ids": 0}}
    write_manifest(tmp_path, replace(manifest, config=older, plan=plan))
    assert read_manifest(tmp_path).tokenizer.vocab_extra_ids == expected


def test_runs_from_before_the_flags_of_the_sample_order_had_that_of_bigscience(tmp_path, manifest):
    plan = tiny_plan("--sample-order", "megatron-core").to_dict()
    data = {**plan["data"]}
    del data["sample_order"], data["blend_surplus"]
    write_manifest(tmp_path, replace(manifest, plan={**plan, "data": data}))
    found = read_manifest(tmp_path).data
    assert (found.sample_order, found.blend_surplus) == ("bigscience", 0.005)


def test_sections_are_those_that_were_saved(tmp_path, manifest):
    decided = tiny_plan(*("--optimizer", "muon", "--fim-rate", "0.5", "--swiglu"))
    config = tiny_config("--rotary-base", "5", "--position-embedding-type", "rotary")
    saved = replace(manifest, plan=decided.to_dict(), config=asdict(config))
    write_manifest(tmp_path, saved)
    for found in (saved, read_manifest(tmp_path)):
        assert found.spec == decided.model
        for name in (
            *("batch", "checkpoint", "data", "objective", "optimizer", "parallel", "precision"),
            *("schedule", "training"),
        ):
            assert getattr(found, name) == getattr(decided, name), name
        assert (found.network_flags, found.tokenizer) == (config.model, config.tokenizer)


def test_a_section_of_another_version(manifest):
    sizes = {"micro_batch_size": 1, "global_batch_size": 4, "data_parallel_size": 2}
    ramp = {"ramp_start": 4, "ramp_increment": 1, "ramp_samples": 0}
    newer = replace(manifest, plan={"batch": {**sizes, **ramp, "unknown": 3}})
    assert newer.batch.num_micro_batches(4) == 2
    for name, lost in (("batch", "ramp_start"), ("schedule", "peak")):
        other = replace(manifest, plan={"batch": sizes})
        with problem(f"plan.{name} … {lost}", CheckpointError):
            getattr(other, name)


def test_a_network_whose_plugin_is_missing_is_read_with_fields_of_its_own(manifest):
    own = {"architecture": "stairs", "steps": [3, 4]}
    spec = replace(manifest, plan={"model": {**flat(tiny_spec()), **own}}).spec
    assert (spec.num_layers, spec.architecture, spec.own.steps) == (2, "stairs", (3, 4))
    assert flat(spec)["steps"] == (3, 4)
    with problem("--network stairs … --plugin"):
        _ = spec.network


def test_a_file_is_recorded_by_name_size_and_hash(tmp_path, manifest):
    expected = xxhash.xxh3_128_hexdigest(bytes(5_000_000))
    assert manifest.files[1] == FileRecord("b.pt", 5_000_000, f"xxh3_128:{expected}")


def test_whole_files_are_not_damaged(tmp_path, manifest):
    assert damage(tmp_path, manifest.files) == []


@pytest.mark.parametrize("position", [0, 2_500_000, 4_999_999])
def test_one_flipped_bit_is_found(tmp_path, manifest, position):
    content = bytearray((tmp_path / "b.pt").read_bytes())
    content[position] ^= 1
    (tmp_path / "b.pt").write_bytes(content)
    (problem,) = damage(tmp_path, manifest.files)
    assert problem == f"{tmp_path}/b.pt is damaged: its hash is not that of the manifest"


def test_a_truncated_file_is_found(tmp_path, manifest):
    (tmp_path / "b.pt").write_bytes(bytes(4_999_999))
    assert damage(tmp_path, manifest.files) == [
        f"{tmp_path}/b.pt has 4999999 bytes instead of 5000000"
    ]


def test_every_missing_file_is_found(tmp_path, manifest):
    (tmp_path / "a.pt").unlink()
    (tmp_path / "b.pt").unlink()
    assert damage(tmp_path, manifest.files) == [
        f"{tmp_path}/a.pt is missing",
        f"{tmp_path}/b.pt is missing",
    ]


def test_tools_name_a_newer_checkpoint_without_a_manifest(tmp_path, caplog):
    for step in (5, 10, 15):
        (tmp_path / f"global_step{step}").mkdir()
    (tmp_path / "global_step10" / MANIFEST).touch()
    (tmp_path / "global_step20").touch()  # a file was never a checkpoint
    assert checkpoint_of(tmp_path) == tmp_path / "global_step10"
    assert caplog.messages == [
        f"{tmp_path}/global_step15 has no manifest.json and is passed over: it was not saved "
        "completely, or is damaged; the newest complete one is global_step10"
    ]
    assert checkpoint_of(tmp_path / "global_step10") == tmp_path / "global_step10"
    assert len(caplog.messages) == 1


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    with problem("manifest.json: No such file … no checkpoint", CheckpointError):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"x"',
        "{}",
        '{"files": [{"name": "a"}]}',
        '{"files": 3}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_manifest_is_an_error(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with problem("manifest.json … damaged", CheckpointError):
        read_manifest(tmp_path)


def test_a_truncated_manifest_is_damaged(tmp_path, manifest):
    write_manifest(tmp_path, manifest)
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text[: len(text) // 2])
    with problem("manifest.json … damaged", CheckpointError):
        read_manifest(tmp_path)


def test_a_newer_format_is_refused(tmp_path, manifest):
    write_manifest(tmp_path, replace(manifest, format=CHECKPOINT_FORMAT + 1))
    with problem("manifest.json … format 4 … 3 … update", CheckpointError):
        read_manifest(tmp_path)


def test_a_newer_format_with_other_fields_is_refused(tmp_path, manifest):
    write_manifest(tmp_path, replace(manifest, format=CHECKPOINT_FORMAT + 1))
    content = json.loads((tmp_path / MANIFEST).read_text())
    content["experts"] = content.pop("partition_dims")
    del content["sha256"]
    (tmp_path / MANIFEST).write_text(seal_json(content))
    with problem("manifest.json … format 4 … 3 … update", CheckpointError):
        read_manifest(tmp_path)


def test_no_byte_of_a_manifest_changes_unnoticed(tmp_path, manifest):
    write_manifest(tmp_path, manifest)
    whole = (tmp_path / MANIFEST).read_bytes()
    for place in range(len(whole)):
        (tmp_path / MANIFEST).write_bytes(
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
        with problem("manifest.json … damaged", CheckpointError):
            read_manifest(tmp_path)


def of_format(number, manifest, tmp_path):
    """Return the manifest's entries in an older format, whose files had SHA-256."""
    entries = asdict(replace(manifest, format=number))
    for record in entries["files"]:
        del record["hash"]
        content = (tmp_path / record["name"]).read_bytes()
        record["sha256"] = hashlib.sha256(content).hexdigest()
    return entries


def test_a_manifest_of_the_format_without_a_hash_of_its_own_is_read(tmp_path, manifest):
    older = of_format(1, manifest, tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(older, indent=1))
    read = read_manifest(tmp_path)
    assert replace(read, files=()) == replace(manifest, files=())
    (tmp_path / MANIFEST).write_text(json.dumps(older | {"format": 2}, indent=1))
    with problem("manifest.json … damaged … hash", CheckpointError):
        read_manifest(tmp_path)


def test_files_of_the_formats_with_sha256_are_compared_with_it(tmp_path, manifest):
    (tmp_path / MANIFEST).write_text(seal_json(of_format(2, manifest, tmp_path)))
    files = read_manifest(tmp_path).files
    assert files[0].hash == "sha256:" + hashlib.sha256(b"weights").hexdigest()
    assert damage(tmp_path, files) == []
    (tmp_path / "a.pt").write_bytes(b"weighty")
    assert damage(tmp_path, files) == [
        f"{tmp_path}/a.pt is damaged: its hash is not that of the manifest"
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_a_manifest_of_an_older_format_is_written_in_this_one(tmp_path, manifest, number):
    """As that of a universal checkpoint is, made of an older one."""
    (tmp_path / MANIFEST).write_text(seal_json(of_format(number, manifest, tmp_path)))
    older = read_manifest(tmp_path)
    write_manifest(tmp_path, older)
    assert json.loads((tmp_path / MANIFEST).read_text())["format"] == CHECKPOINT_FORMAT
    assert read_manifest(tmp_path) == older


def test_a_hash_of_another_kind_is_refused(tmp_path, manifest):
    other = FileRecord("a.pt", 7, "crc32:1234abcd")
    write_manifest(tmp_path, replace(manifest, files=(other,)))
    with problem("manifest.json … 'crc32' … xxh3_128", CheckpointError):
        read_manifest(tmp_path)


def test_a_file_that_the_disk_does_not_give_back_is_damaged(tmp_path, manifest, os_calls):
    os_calls("open", errno.EIO, on=".pt", module=io)
    problems = damage(tmp_path, manifest.files)
    assert problems == [
        f"{tmp_path / name} cannot be read: Input/output error" for name in ("a.pt", "b.pt")
    ]


def test_the_names_in_all_folders_of_a_checkpoint_are_flushed(tmp_path, manifest, os_calls):
    (tmp_path / "zero" / "weight").mkdir(parents=True)
    flushed = os_calls("fsync")
    write_manifest(tmp_path, manifest)
    assert flushed[0] == str(tmp_path / MANIFEST)
    folders = (tmp_path, tmp_path / "zero", tmp_path / "zero" / "weight")
    assert {*flushed[1:]} == {*map(str, folders)}
