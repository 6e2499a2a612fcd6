"""Samples of Retro from files of preprocessing: chunks, continuations, blocks, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from problems import problem
from retro_project import (
    EOD,
    SETTINGS,
    h5py,
    random_documents,
    samples_of,
    write_neighbors,
    write_project,
    write_settings,
)

from megatron.common.errors import DataError
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.data.datasets.datasets import build_datasets
from megatron.extensions.retro.data import retro_view
from megatron.extensions.retro.retrieval import hdf5_files
from megatron.extensions.retro.retrieval.chunk_database import ChunkDatabase, read_chunks
from megatron.extensions.retro.retrieval.hdf5_files import BlockedRows

NETWORK = (
    *("--num-layers", "6", "--hidden-size", "8", "--num-attention-heads", "2", "--lr", "1"),
    *("--micro-batch-size", "2", "--vocab-size", str(EOD), "--retro-add-retriever"),
)


def plan_of(folder, *flags):
    config, _ = parse_config([*NETWORK, "--retro-project-dir", str(folder), *flags])
    return plan(config, world_size=1, vocab_size=EOD + 1, device="cpu", objective="retro")


def datasets_of(folder, *flags, vocab_size=EOD + 1):
    planned = plan_of(folder, *flags)
    view = retro_view(planned.objective.own, pad=EOD, vocab_size=vocab_size)
    return build_datasets(planned.data, seq_length=16, seed=1234, view=view)


def test_a_neighbor_continues_in_its_own_document_alone(tmp_path):
    write_project(
        tmp_path / "p", [[5, 6, 7, 8, 9], [1, 2, 3, 4, 10, 11, 12, 13], *random_documents(20)]
    )
    database = ChunkDatabase(tmp_path / "p", chunk_length=4, num_chunks=2, pad=0)
    found = [database.retrieve(number) for number in (0, 1, 2, 3, -1)]
    assert [(tokens.tolist(), length) for tokens, length in found] == [
        ([5, 6, 7, 8, 9, 0, 0, 0], 5),
        ([9, 0, 0, 0, 0, 0, 0, 0], 1),
        ([1, 2, 3, 4, 10, 11, 12, 13], 8),
        ([10, 11, 12, 13, 0, 0, 0, 0], 4),
        ([0] * 8, 0),
    ]
    with problem("chunk 4000 … train.hdf5", DataError):
        database.retrieve(4000)


def test_the_last_chunk_of_the_database_has_no_continuation(tmp_path):
    documents = random_documents(20)
    write_project(tmp_path / "p", documents)
    database = ChunkDatabase(tmp_path / "p", chunk_length=4, num_chunks=3, pad=0)
    tokens, length = database.retrieve(len(database) - 1)
    last = documents[-1][(len(documents[-1]) - 1) // 4 * 4 :]
    assert (tokens[:length].tolist(), length) == (last, len(last))


def test_chunks_that_the_database_lacks_end_a_neighbor(tmp_path):
    """Preprocessing leaves out a chunk without a word for the embedder."""
    write_project(tmp_path / "p", [[*range(1, 13)], *random_documents(20)])
    with h5py.File(tmp_path / "p" / "db" / "merged" / "train.hdf5", "r+") as file:
        kept = np.delete(file["chunks"][...], 1, axis=0)
        del file["chunks"]
        file.create_dataset("chunks", data=kept)
    database = ChunkDatabase(tmp_path / "p", chunk_length=4, num_chunks=2, pad=0)
    assert database.retrieve(0)[1] == 4
    assert database.retrieve(1)[0][:4].tolist() == [9, 10, 11, 12]


def test_samples_have_the_neighbors_of_their_chunks(tmp_path):
    """Nearest chunks are the sample's own tokens here, wherever its chunks lie in documents."""
    rng = np.random.RandomState(3)

    def find(queries, chunks):
        found = rng.randint(-1, len(chunks), (len(queries), 3))
        stored.append((found, queries))
        return found

    stored = []
    folder = write_project(tmp_path / "p", random_documents(60), find=find)
    sets = datasets_of(folder)
    database = ChunkDatabase(folder, chunk_length=4, num_chunks=2, pad=EOD)
    for dataset, (neighbors, queries) in zip(
        (sets.train, sets.valid["valid"]), stored, strict=False
    ):
        for i in range(len(queries) // 4):
            sample = dataset[i]
            assert sample["tokens"][:-1].tolist() == queries[4 * i : 4 * i + 4].ravel().tolist()
            for c in range(4):
                for k in range(2):
                    tokens, length = database.retrieve(int(neighbors[4 * i + c, k]))
                    assert sample["neighbor_tokens"][c, k].tolist() == tokens.tolist()
                    assert sample["neighbor_lengths"][c, k] == length
    assert sets.train.origin(3) == sets.train.dataset.origin(3)


def test_rows_are_joined_over_blocks(tmp_path):
    rows = np.arange(75).reshape(25, 3)
    write_neighbors(tmp_path / "q", rows, block=10)
    table = BlockedRows(tmp_path / "q", "neighbors")
    assert len(table) == 25
    for start in range(25):
        for stop in range(start + 1, 26):
            assert table.rows(start, stop).tolist() == rows[start:stop].tolist()


def test_blocks_that_are_missing_damaged_or_short_are_refused(tmp_path):
    rows = np.arange(75).reshape(25, 3)
    write_neighbors(tmp_path / "q", rows, block=10)
    (tmp_path / "q" / "00010-00020.hdf5").rename(tmp_path / "kept")
    with problem("row 20 … row 10", DataError):
        BlockedRows(tmp_path / "q", "neighbors")
    (tmp_path / "q" / "00010-00020.hdf5").write_bytes((tmp_path / "kept").read_bytes()[:700])
    with problem("cannot be read … HDF5", DataError):
        BlockedRows(tmp_path / "q", "neighbors").rows(5, 15)
    with h5py.File(tmp_path / "q" / "00010-00020.hdf5", "w") as file:
        file.create_dataset("neighbors", data=rows[:4])
    with problem("[4, 3]", DataError):
        BlockedRows(tmp_path / "q", "neighbors").rows(5, 15)
    with problem("no array other … neighbors", DataError):
        BlockedRows(tmp_path / "q", "other").rows(0, 5)


def _of_strings(file):
    file.create_dataset("chunks", data=["a", "b"], dtype=h5py.string_dtype())


def _of_pairs(file):
    file.create_dataset("chunks", data=np.zeros((3, 5), [("a", "i4"), ("b", "i4")]))


def _of_floats(file):
    file.create_dataset("chunks", data=np.zeros((3, 5)))


def _of_four_columns(file):
    file.create_dataset("chunks", data=np.zeros((3, 4), np.uint32))


def _without_rows(file):
    file["chunks"] = h5py.Empty("i4")


def _a_group(file):
    file.create_group("chunks")


def _linked(file):
    file["chunks"] = h5py.ExternalLink("other.hdf5", "chunks")


def _linked_inside(file):
    file["other"] = h5py.ExternalLink("other.hdf5", "/")
    file["chunks"] = h5py.SoftLink("/other/chunks")


def _stored_elsewhere(file):
    external = [(str(Path(file.filename).with_name("other.hdf5")), 0, 60)]
    file.create_dataset("chunks", (3, 5), np.uint32, external=external)


def _virtual(file):
    layout = h5py.VirtualLayout((3, 5), np.uint32)
    layout[...] = h5py.VirtualSource("other.hdf5", "chunks", (3, 5))
    file.create_virtual_dataset("chunks", layout)


def _never_written(file):
    file.create_dataset("chunks", (10**12, 5), np.uint32, chunks=(1000, 5))


@pytest.mark.parametrize(
    "make, message",
    [
        (_of_strings, "object … [2] … integers"),
        (_of_pairs, "table of integers"),
        (_of_floats, "float64 … [3, 5] … integers"),
        (_of_four_columns, "[3, 4] … [n, 5]"),
        (_without_rows, "table of integers"),
        (_a_group, "array of this file"),
        (_linked, "array of this file … another"),
        (_linked_inside, "array of this file … another"),
        (_stored_elsewhere, "array of this file … another"),
        (_virtual, "array of this file … another"),
        (_never_written, "0 bytes"),
    ],
)
def test_only_tables_of_numbers_in_the_file_itself_are_read(tmp_path, make, message):
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file.create_dataset("chunks", data=np.ones((3, 5), np.uint32))
    with h5py.File(tmp_path / "file.hdf5", "w") as file:
        make(file)
    with problem(message, DataError):
        read_chunks(tmp_path / "file.hdf5")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_damaged_hdf5_file_is_one_sentence(tmp_path, is_chunked):
    rows = np.arange(200, dtype=np.uint32).reshape(40, 5)
    with h5py.File(tmp_path / "file.hdf5", "w") as file:
        file.create_dataset("chunks", data=rows, chunks=is_chunked or None)
    content = np.fromfile(tmp_path / "file.hdf5", np.uint8)
    rng = np.random.RandomState(0)
    num_refused = 0
    for _ in range(150):
        damaged = content.copy()
        places = rng.randint(0, min(len(content), 2300), rng.randint(1, 12))
        damaged[places] = rng.randint(0, 256, len(places))
        damaged.tofile(tmp_path / "damaged.hdf5")
        try:
            np.array(read_chunks(tmp_path / "damaged.hdf5"))
        except DataError as error:
            num_refused += 1
            assert "damaged.hdf5" in str(error)
    assert num_refused


def test_integers_of_unusual_bits_are_converted(tmp_path):
    """Memory maps show the bytes of a file as they are."""
    kind = h5py.h5t.STD_U32LE.copy()
    kind.set_precision(16)
    kind.set_offset(8)
    with h5py.File(tmp_path / "file.hdf5", "w") as file:
        space = h5py.h5s.create_simple((3, 5))
        made = h5py.h5d.create(file.id, b"chunks", kind, space)
        made.write(space, space, np.full((3, 5), 7, np.uint32))
    assert (read_chunks(tmp_path / "file.hdf5") == 7).all()


def test_blocks_of_different_widths_are_refused(tmp_path):
    write_neighbors(tmp_path / "q", np.arange(75).reshape(25, 3), block=10)
    with h5py.File(tmp_path / "q" / "00010-00020.hdf5", "w") as file:
        file.create_dataset("neighbors", data=np.zeros((10, 2), np.int64))
    with problem("[10, 2] … [n, 3]", DataError):
        BlockedRows(tmp_path / "q", "neighbors").rows(5, 15)


def test_without_h5py_the_message_names_the_package(tmp_path, modules):
    modules("h5py")
    with problem("pip install h5py"):
        hdf5_files.read_array(tmp_path / "file.hdf5", "chunks")


def test_neighbors_of_fewer_samples_are_refused_or_repeat(tmp_path):
    folder = write_project(tmp_path / "p", random_documents(60))
    settings = json.loads((folder / "config.json").read_text())
    write_settings(folder, settings | {"retro_gpt_train_samples": 20})
    with problem("64 chunks … 20 samples … 80", DataError):
        datasets_of(folder)
    train = datasets_of(folder, "--retro-no-verify-neighbor-count").train
    for i in (0, 3):
        for name, values in train[i].items():
            assert values.tolist() == train[i + 16][name].tolist()


def test_more_neighbors_than_were_saved_are_refused(tmp_path):
    folder = write_project(tmp_path / "p", random_documents(60))
    with problem("--retro-num-neighbors 4 … 3", DataError):
        datasets_of(folder, "--retro-num-neighbors", "4").train[0]


def test_neighbors_with_tokens_of_another_vocabulary_are_refused(tmp_path):
    folder = write_project(tmp_path / "p", random_documents(60))
    train = datasets_of(folder, vocab_size=5).train
    with problem("train.hdf5 … vocabulary of 5", DataError):
        train[0]


def test_a_project_without_neighbors_or_databases_is_refused(tmp_path):
    folder = write_project(tmp_path / "p", random_documents(60))
    settings = json.loads((folder / "config.json").read_text())
    write_settings(folder, settings | {"retro_neighbor_dirs": {"train": "train_9"}})
    with problem("query/train_9 … train … no such"):
        datasets_of(folder)
    write_settings(folder, {**settings, "retro_neighbor_dirs": None})
    with problem("no folder … train"):
        datasets_of(folder)
    (folder / "db" / "indexed_dataset_infos.json").write_text("[{}]")
    with problem("list of data sets … prefix", DataError):
        datasets_of(folder)
    (folder / "db" / "indexed_dataset_infos.json").unlink()
    with problem("cannot read … infos.json", DataError):
        datasets_of(folder)
    (folder / "db" / "merged" / "train.hdf5").write_bytes(b"")
    with problem("cannot be read … HDF5", DataError):
        datasets_of(folder)


def test_settings_of_the_project_are_those_of_the_run(tmp_path):
    folder = write_project(tmp_path / "p", random_documents(60))
    planned = plan_of(folder)
    assert planned.model.seq_length == 16
    assert (planned.batch.global_batch_size, planned.training.train_samples) == (4, 16)
    assert planned.data.train.sources[0].prefix == str(folder / "data" / "corpus")
    assert planned.data.split == "80,20,0"
    assert (planned.objective.own.chunk_length, planned.objective.own.num_chunks) == (4, 4)
    assert planned.model.own.retro_retrieved_length == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seq-length", "32"), "--seq-length 32 … retro_gpt_seq_length 16"),
        (("--seed", "7"), "--seed 7 … retro_gpt_seed 1234"),
        (("--split", "98,2,0"), "--split 98,2,0 … retro_gpt_split 80,20,0"),
        (("--global-batch-size", "8"), "--global-batch-size 8 … retro_gpt_global_batch_size"),
        (("--eval-interval", "5"), "--eval-interval 5 … retro_gpt_eval_interval"),
        (("--retro-chunk-length", "8"), "--retro-chunk-length 8 … retro_gpt_chunk_length"),
        (("--tokenizer-type", "GPT2BPETokenizer"), "GPT2BPETokenizer … retro_gpt_tokenizer_type"),
        (("--train-iters", "3"), "--train-iters 3 … retro_gpt_train_samples"),
    ],
)
def test_flags_that_contradict_the_project_are_refused(flags, message, tmp_path):
    write_settings(tmp_path, SETTINGS)
    with problem(message):
        parse_config([*NETWORK, "--retro-project-dir", str(tmp_path), *flags])
    with problem(message):
        words = NETWORK[:-1]  # a GPT baseline sees the same samples
        parse_config([*words, "--retro-project-dir", str(tmp_path), *flags])


def test_equal_flags_and_other_places_of_token_files_are_accepted(tmp_path):
    write_settings(tmp_path, SETTINGS)
    flags = ["--retro-project-dir", str(tmp_path), "--seq-length", "16", "--data-path", "elsewhere"]
    config, _ = parse_config([*NETWORK, *flags])
    assert config.data.data_path == ["elsewhere"]


def test_blends_and_files_are_relative_to_the_project(tmp_path):
    paths = {"retro_gpt_data_path": "0.3 a 0.7 b/c", "retro_gpt_vocab_file": "tokenizer/vocab.json"}
    write_settings(tmp_path, SETTINGS | paths)
    config, _ = parse_config([*NETWORK, "--retro-project-dir", str(tmp_path)])
    data = str(tmp_path / "data")
    assert config.data.data_path == ["0.3", f"{data}/a", "0.7", f"{data}/b/c"]
    assert config.tokenizer.vocab_file == str(tmp_path / "tokenizer" / "vocab.json")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "config.json … JSON"), ("[]", "config.json … JSON object")]
)
def test_a_damaged_file_of_settings_is_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with problem(message):
        parse_config([*NETWORK, "--retro-project-dir", str(tmp_path)])
    with problem("cannot read … none/config.json"):
        parse_config([*NETWORK, "--retro-project-dir", str(tmp_path / "none")])


def test_evaluation_alone_reads_the_samples_of_training(tmp_path):
    """Which sample is the i-th depends on how many a run takes, and neighbors are those of a full run."""
    folder = write_project(tmp_path / "p", random_documents(60))
    assert plan_of(folder, "--eval-only", "--load", "c").data == plan_of(folder).data
    assert samples_of(folder, SETTINGS)["valid"].shape == (12, 17)
