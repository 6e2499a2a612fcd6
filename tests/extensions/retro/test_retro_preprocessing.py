"""Retro preprocessing: database, index and neighbors, on several ranks, and after kills."""

import json

import numpy as np
import pytest
from forks import exit_codes
from problems import problem, require_problem
from retro_preprocessing import (
    CHUNK,
    COPIED,
    EOD,
    RECALL,
    TOOL,
    chunks_of,
    config_of,
    h5py,
    neighbors_of,
    preprocess,
    preprocess_and_die,
    tables,
    words_for,
    write_corpora,
)

from megatron.common.errors import DataError
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.data.datasets.datasets import build_datasets
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter, open_token_files
from megatron.extensions.retro.data import retro_view
from megatron.extensions.retro.retrieval import vector_index
from megatron.extensions.retro.retrieval.blocks import Ranks, table_blocks
from megatron.extensions.retro.retrieval.chunk_database import ChunkDatabase
from megatron.extensions.retro.retrieval.database_build import cut_documents, require_uint32
from megatron.extensions.retro.retrieval.embedders import HashedEmbedder, WordCounter
from megatron.extensions.retro.retrieval.flags import retro_tasks
from megatron.extensions.retro.retrieval.index_build import rows_of_fraction
from megatron.extensions.retro.retrieval.neighbors import samples_of
from megatron.extensions.retro.retrieval.project import prepare_project
from megatron.extensions.retro.retrieval.vector_index import new_index, read_index
from megatron.tokenizer.types.null import NullTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpora, and the project that one rank makes of them."""
    folder = tmp_path_factory.mktemp("retro")
    write_corpora(folder)
    preprocess(folder / "project")
    return folder


@pytest.fixture
def corpora(tmp_path):
    write_corpora(tmp_path)
    return tmp_path


def project_of(folder):
    return prepare_project(config_of(folder), Ranks())


def texts_of(project, chunks):
    """Return the tokens of chunks of the database as text."""
    return [
        " ".join(map(str, project.datasets[dataset].get(document, start, end - start)))
        for dataset, document, start, end, _ in chunks.tolist()
    ]


def test_chunks_of_documents(tmp_path):
    """Chunks of a document end before its EOD, and none goes on into the next document."""
    with IndexedDatasetWriter(tmp_path / "corpus", "u2") as writer:
        writer.append([5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 0], [6, 5])
    found = cut_documents(
        range(2),
        dataset=open_token_files(tmp_path / "corpus"),
        tokenizer=NullTokenizer(0),
        counter=WordCounter(),
        chunk_length=4,
    )
    assert found["chunks_valid"].tolist() == [[0, 0, 4, 4], [0, 4, 5, 1], [1, 0, 4, 4]]
    assert found["doc_offsets"].tolist() == [[0, 2], [1, 3]]
    assert found["chunks_invalid"].shape == (0, 4)
    assert {key: array.dtype.name for key, array in found.items()} == {
        "chunks_valid": "uint32",
        "chunks_invalid": "uint32",
        "doc_offsets": "uint64",
    }


def test_chunks_without_a_word_are_not_in_the_database(tmp_path):
    class Counter:
        def count(self, texts):
            return [0 if "7" in text else 3 for text in texts]

    with IndexedDatasetWriter(tmp_path / "corpus", "u2") as writer:
        writer.append([5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 0], [6, 5])
    found = cut_documents(
        range(2),
        dataset=open_token_files(tmp_path / "corpus"),
        tokenizer=NullTokenizer(0),
        counter=Counter(),
        chunk_length=4,
    )
    assert found["chunks_valid"].tolist() == [[0, 4, 5, 3], [1, 0, 4, 3]]
    assert found["chunks_invalid"].tolist() == [[0, 0, 4, 0]]
    assert found["doc_offsets"].tolist() == [[0, 1], [1, 2]]


def test_the_database_has_the_documents_of_the_samples_of_training(folder):
    chunks, valid = chunks_of(folder / "project"), chunks_of(folder / "project", "valid")
    infos = json.loads((folder / "project" / "db" / "indexed_dataset_infos.json").read_text())
    assert [(info["prefix"], info["n_docs"], info["n_docs_train"]) for info in infos] == [
        ("first", 130, 104),
        ("second", 41, 33),
    ]
    samples = next(samples_of(project_of(folder / "project")))
    parts = [samples.dataset.origin(i) for i in range(len(samples.dataset))]
    for number, info in enumerate(infos):
        read = {
            piece.document
            for part in parts
            if part.prefix.endswith(info["prefix"])
            for piece in part.pieces
        }
        stored = set(chunks[chunks[:, 0] == number, 1].tolist())
        assert max(read) < info["n_docs_train"]
        assert stored == set(range(info["n_docs_train"]))
        others = set(valid[valid[:, 0] == number, 1].tolist())
        assert others == set(range(info["n_docs_train"], info["n_docs"]))
        assert info["n_chunks_train"] == (chunks[:, 0] == number).sum()
    with h5py.File(folder / "project" / "db" / "merged" / "train.hdf5", "r") as file:
        assert file["n_written"][...].tolist() == [len(chunks)]
        offsets = file["doc_offsets"][...]
    assert offsets[-1].tolist() == [1, 32, len(chunks)]
    for dataset, document, end in offsets[::7].tolist():
        rows = chunks[:end]
        assert rows[-1, :2].tolist() == [dataset, document]


def test_a_default_split_is_normalized(corpora):
    preprocess(corpora / "p", "--retro-gpt-split", "969,30,1", "--retro-tasks", "db-build")
    infos = json.loads((corpora / "p" / "db" / "indexed_dataset_infos.json").read_text())
    assert [info["n_docs_train"] for info in infos] == [126, 40]


def test_the_sample_that_trains_is_seeded_and_spread(corpora):
    for seed in ("1", "1", "2"):
        for name in ("a", "b", "c"):
            if not (corpora / name).exists():
                preprocess(
                    corpora / name,
                    *("--retro-index-ntrain", "100", "--retro-gpt-seed", seed),
                    *("--retro-tasks", "db-build"),
                )
                break
    first, same, other = (chunks_of(corpora / name, "sampled") for name in ("a", "b", "c"))
    assert first.tolist() == same.tolist() != other.tolist()
    assert (first[:, 0] == 0).sum() == 70
    assert (first[:, 0] == 1).sum() == 30
    assert len({tuple(row) for row in first.tolist()}) == 100
    everything = {tuple(row) for row in chunks_of(corpora / "a").tolist()}
    assert {tuple(row) for row in first.tolist()} <= everything
    assert first[first[:, 0] == 0, 1].max() > 80


def test_numbers_above_32_bits_are_refused():
    require_uint32(2**32 - 1, "tokens")
    with problem("tokens … 4294967296 … 32 bits", DataError):
        require_uint32(2**32, "tokens")


@pytest.mark.parametrize("size", [2, 3])
def test_files_do_not_depend_on_the_number_of_ranks(size, folder, corpora):
    preprocess(corpora / "project", size=size)
    found, expected = tables(corpora / "project"), tables(folder / "project")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    settings = [
        json.loads((each / "project" / "config.json").read_text()) for each in (corpora, folder)
    ]
    assert settings[0] == settings[1]


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_files(folder, corpora):
    codes, after = [], iter((4, 9, 12, *range(15, 100)))
    while not codes or codes[-1] != 0:
        codes += exit_codes(
            preprocess_and_die, [(str(corpora / "project"), next(after))], timeout_s=120
        )
    assert len(codes) > 3
    assert {*codes} == {-9, 0}
    found, expected = tables(corpora / "project"), tables(folder / "project")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_near_copy_in_another_document_is_the_first_neighbor(folder):
    project, chunks = project_of(folder / "project"), chunks_of(folder / "project")
    neighbors, found = neighbors_of(folder / "project", "train"), 0
    samples = next(samples_of(project))
    for row, ids in enumerate(neighbors):
        origin = samples.dataset.origin(row // 4)
        spans = [
            (piece.document, start)
            for piece in origin.pieces
            for start in range(piece.start, piece.stop - 1, CHUNK)
        ]
        document, start = spans[row % 4]
        twin = document + COPIED if document < COPIED else document - COPIED
        own = {piece.document for piece in origin.pieces}
        if origin.prefix.endswith("first") and document < 2 * COPIED and twin not in own:
            assert chunks[ids[0], :3].tolist() == [0, twin, start]
            found += 1
    assert found > 20


def test_no_neighbor_is_of_a_document_of_the_sample(folder):
    project, chunks = project_of(folder / "project"), chunks_of(folder / "project")
    for samples in samples_of(project):
        neighbors = neighbors_of(folder / "project", samples.role)
        assert len(neighbors) == samples.count * 4
        for row, ids in enumerate(neighbors):
            origin = samples.dataset.origin(row // 4)
            number = [dataset.prefix for dataset in project.datasets].index(origin.prefix)
            own = {(number, piece.document) for piece in origin.pieces}
            kept = ids[ids >= 0]
            assert len(kept)
            assert own.isdisjoint(map(tuple, chunks[kept, :2].tolist()))
            assert (ids[len(kept) :] == -1).all()


def test_missing_neighbors_are_minus_one(corpora):
    preprocess(
        corpora / "p",
        *("--retro-query-num-neighbors-query", "5"),  # of which some are the sample's own
    )
    assert (neighbors_of(corpora / "p", "train") == -1).any()


def test_flat_neighbors_equal_brute_force(folder):
    project, chunks = project_of(folder / "project"), chunks_of(folder / "project")
    embedder = HashedEmbedder(256)
    database = embedder.embed(texts_of(project, chunks)).astype(np.float64)
    for samples in samples_of(project):
        neighbors = neighbors_of(folder / "project", samples.role)
        for row, ids in enumerate(neighbors):
            start = row % 4 * CHUNK
            tokens = samples.dataset[row // 4]["tokens"][start : start + CHUNK]
            text = " ".join(str(token) for token in tokens if token != EOD)
            origin = samples.dataset.origin(row // 4)
            number = [dataset.prefix for dataset in project.datasets].index(origin.prefix)
            own = {(number, piece.document) for piece in origin.pieces}
            distances = ((database - embedder.embed([text]).astype(np.float64)) ** 2).sum(1)
            nearest = np.sort(distances)
            kept = [
                i
                for i in np.argsort(distances, kind="stable")[:12]
                if tuple(chunks[i, :2].tolist()) not in own
            ][:5]
            # Of equal distances either may come first, and the twelfth may be another.
            if np.diff(nearest[:14]).min() > 1e-6:
                assert ids[ids >= 0].tolist() == kept
            else:
                found = distances[ids[ids >= 0]]
                np.testing.assert_allclose(found[:3], distances[kept][: len(found)][:3], atol=1e-5)


def test_training_reads_the_neighbors(folder):
    network = [
        *("--num-layers", "6", "--hidden-size", "8", "--num-attention-heads", "2", "--lr", "1"),
        *("--micro-batch-size", "2", "--retro-add-retriever"),
    ]
    config, _ = parse_config([*network, "--retro-project-dir", str(folder / "project")])
    planned = plan(config, world_size=1, vocab_size=EOD + 1, device="cpu", objective="retro")
    view = retro_view(planned.objective.own, pad=EOD, vocab_size=EOD + 1)
    sets = build_datasets(planned.data, seq_length=16, seed=1234, view=view)
    database = ChunkDatabase(folder / "project", chunk_length=CHUNK, num_chunks=2, pad=EOD)
    for dataset, role in ((sets.train, "train"), (sets.valid["valid"], "valid")):
        neighbors = neighbors_of(folder / "project", role)
        for i in range(len(neighbors) // 4):
            sample = dataset[i]["neighbor_tokens"]
            for c in range(4):
                expected = database.retrieve(int(neighbors[4 * i + c, 0]))[0]
                assert sample[c, 0].tolist() == expected.tolist()
    for flag, message in (
        ("--sample-order megatron-core", "--sample-order megatron-core … retro_gpt"),
        ("--vocab-size 300", "--vocab-size 300 … retro_gpt_vocab_size 200"),
    ):
        with problem(message):
            parse_config([*network, "--retro-project-dir", str(folder / "project"), *flag.split()])


def validate(project, *flags):
    TOOL["main"](words_for(project, "--retro-task-validate", "1", *flags))


def test_validation_finds_a_changed_block(corpora, capsys):
    kept = (
        *("--no-retro-index-delete-training-embeddings", "--no-retro-index-delete-added-codes"),
        *("--retro-index-str", "IVF4,Flat"),
    )
    preprocess(corpora / "p", *kept)
    before = {file: file.read_bytes() for file in (corpora / "p").rglob("*") if file.is_file()}
    validate(corpora / "p", *kept)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.endswith("are valid")]) == 6
    assert before == {f: f.read_bytes() for f in (corpora / "p").rglob("*") if f.is_file()}
    for pattern, key in (
        ("db/individual/first/*.hdf5", "chunks_valid"),
        ("index/train_emb/blocks/*.hdf5", "data"),
        ("index/*/*/add_codes/*.hdf5", "data"),
        ("query/valid_*/*.hdf5", "neighbors"),
    ):
        file = sorted((corpora / "p").glob(pattern))[-1]
        content = file.read_bytes()
        with h5py.File(file, "r+") as opened:
            opened[key][0, 0] += 1
        with problem(f"{file.name}: {key} … computed", DataError):
            validate(corpora / "p", *kept)
        file.write_bytes(content)


def test_a_damaged_block_is_computed_again(tmp_path, caplog):
    blocks = table_blocks(tmp_path / "b", "data", num_rows=250, size=100, width=2, dtype=np.int64)
    rows = np.arange(500).reshape(250, 2)
    computed = []

    def compute(block):
        computed.append(block)
        return {"data": rows[block.start : block.stop]}

    blocks.fill(compute, Ranks())
    names = ["0000-0100.hdf5", "0100-0200.hdf5", "0200-0250.hdf5"]
    assert sorted(file.name for file in (tmp_path / "b").iterdir()) == names
    truncated = tmp_path / "b" / names[1]
    truncated.write_bytes(truncated.read_bytes()[:900])
    with h5py.File(tmp_path / "b" / names[2], "w") as file:
        file["data"] = rows[:7]
    again = table_blocks(tmp_path / "b", "data", num_rows=250, size=100, width=2, dtype=np.int64)
    again.fill(compute, Ranks())
    assert computed[3:] == [range(100, 200), range(200, 250)]
    assert np.concatenate([arrays["data"] for arrays in again]).tolist() == rows.tolist()
    assert caplog.text.count("is damaged") == 2


def test_a_rank_that_waits_too_long_names_what_is_missing(tmp_path):
    blocks = table_blocks(tmp_path / "b", "data", num_rows=250, size=100, width=2, dtype=np.int64)
    with problem("1 of 3 blocks … --retro-timeout-s", DataError):
        blocks.fill(
            lambda rows: {"data": np.zeros((len(rows), 2), np.int64)},
            Ranks(0, 2, timeout_s=0.1),
        )


@pytest.mark.parametrize(
    "kind",
    ["Flat", "IVF8,Flat", "IVF8_HNSW4,Flat", "OPQ4_16,IVF4_HNSW4,PQ4x4"],
)
def test_adding_codes_equals_plain_adding(kind, tmp_path):
    draw = np.random.RandomState(0)
    vectors = draw.randn(700, 32).astype(np.float32)
    ids = np.arange(700)
    files = []
    for name in ("codes", "plain"):
        index = new_index(kind, 32, num_threads=1)
        if index.needs_training:
            index.train(vectors)
        for part in (slice(0, 300), slice(300, 700)):
            if name == "codes":
                index.add_codes(index.encode(vectors[part]), ids[part])
            else:
                index.add(vectors[part], ids[part])
        index.write(tmp_path / name)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    again = read_index(tmp_path / "codes", kind, num_threads=1)
    assert len(again) == 700
    again.set_search(nprobe=65536, ef_search=256)
    _, found = again.search(vectors[:50], 3)
    if "PQ" not in kind:
        assert found[:, 0].tolist() == [*range(50)]


def test_a_search_that_finds_fewer_ends_with_minus_one():
    index = new_index("Flat", 4, num_threads=1)
    index.add(np.eye(4, dtype=np.float32)[:2], np.arange(2))
    assert index.search(np.eye(4, dtype=np.float32)[:1], 3)[1].tolist() == [[0, 1, -1]]


def test_what_faiss_refuses_is_one_message(tmp_path, modules):
    with problem("--retro-index-str Unknown7 … faiss"):
        new_index("Unknown7", 32, num_threads=1)
    with problem("IVF64,Flat … 10 chunks", DataError):
        new_index("IVF64,Flat", 32, num_threads=1).train(np.zeros((10, 32), np.float32))
    with problem("--retro-index-type faiss-base"):
        _ = new_index("HNSW8", 32, num_threads=1).code_size
    with problem("all chunks or none"):
        new_index("Flat", 2, num_threads=1).add(np.zeros((2, 2), np.float32), np.array([0, 3]))
    (tmp_path / "index").write_bytes(b"no index")
    with problem("index … cannot be read", DataError):
        read_index(tmp_path / "index", "Flat", num_threads=1)

    modules("faiss")
    with problem("pip install faiss-cpu"):
        new_index("Flat", 2, num_threads=1)


def test_an_index_that_states_too_large_a_size_is_one_sentence(tmp_path, monkeypatch):
    """faiss allocates what a damaged file states; which size fails depends on the machine."""

    def allocate(name):
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(vector_index.import_faiss(1), "read_index", allocate)
    (tmp_path / "index").write_bytes(b"index")
    with problem("index … std::bad_alloc", DataError):
        read_index(tmp_path / "index", "Flat", num_threads=1)


@pytest.mark.parametrize(
    "flags",
    [
        ("--retro-index-type", "faiss-base", "--retro-index-str", "HNSW8"),
        ("--retro-index-type", "faiss-base"),
        (
            *("--retro-index-str", "IVF4,Flat", "--retro-index-train-load-fraction", "0.9"),
            *("--retro-index-add-load-fraction", "0.5", "--retro-index-ntrain", "200"),
        ),
    ],
    ids=["graph", "plain", "fractions"],
)
def test_other_indices_find_neighbors_too(flags, corpora, folder):
    preprocess(corpora / "p", *flags, size=2)
    found, expected = (neighbors_of(each, "train") for each in (corpora / "p", folder / "project"))
    share = np.mean([len({*a} & {*b}) / 5 for a, b in zip(found, expected, strict=True)])
    assert share > (0.3 if "0.5" in flags else 0.9)
    if "0.5" in flags:
        total = len(chunks_of(corpora / "p"))
        assert {*found.ravel().tolist()} <= {-1, *rows_of_fraction(total, 0.5).tolist()}
        assert (corpora / "p/index/faiss-par-add/IVF4,Flat/added_0.900_0.500.faissindex").exists()


def recall_lines(project, capsys, *flags):
    RECALL["main"](["--retro-project-dir", str(project), "--recall-at", "1", "5", *flags])
    return capsys.readouterr().out.splitlines()


def test_recall_of_an_index(corpora, capsys):
    """Exact for Flat, and equal to a count of the nearest for lists that are not searched."""
    project, kind = corpora / "p", ("--retro-index-str", "IVF8,Flat")
    preprocess(project, "--retro-tasks", "db-build,index-build")
    preprocess(project, *kind, "--retro-tasks", "index-build")
    first, last = recall_lines(project, capsys)
    total, others = len(chunks_of(project)), chunks_of(project, "valid")
    assert f"chunks: {total} of {total}" in first
    assert f"searched for: {len(others)}" in first
    assert "| recall@1: 1.0000 | recall@5: 1.0000 |" in last
    lines = recall_lines(project, capsys, *kind, "--recall-nprobe", "8", "1")[1:]
    assert lines[0].startswith("nprobe: 8 | recall@1: 1.0000 | recall@5: 1.0000 |")
    found = dict(part.split(": ") for part in lines[1].split(" | "))
    index = read_index(
        project / "index/faiss-par-add/IVF8,Flat/added_1.000_1.000.faissindex", "", num_threads=1
    )
    exact = read_index(
        project / "index/faiss-par-add/Flat/added_1.000_1.000.faissindex", "", num_threads=1
    )
    vectors = HashedEmbedder(256).embed(texts_of(project_of(project), others))
    index.set_search(nprobe=1, ef_search=1)
    distances, nearest = index.search(vectors, 5)[0], exact.search(vectors, 5)[0]
    for k in (1, 5):
        share = (distances[:, :k] <= nearest[:, k - 1 : k] + 1e-5).mean()
        assert float(found[f"recall@{k}"]) == pytest.approx(share, abs=1e-4)
        assert share < 1
    with problem("--recall-at 9999 … more than"):
        recall_lines(project, capsys, "--recall-at", "9999")
    with problem("--recall-at 0 … 1"):
        recall_lines(project, capsys, "--recall-at", "0")
    with problem("no index … IVF2,Flat", DataError):
        recall_lines(project, capsys, "--retro-index-str", "IVF2,Flat")


def test_names_of_tasks():
    everything = ("db-build", "index-train", "index-add", "query-neighbors")
    assert retro_tasks("build") == everything
    assert retro_tasks("index-build,db-build") == everything[:3]
    assert retro_tasks("query-pretraining-neighbors") == everything[3:]
    assert retro_tasks("pretraining-query-neighbors") == everything[3:]
    with problem("--retro-tasks db-build,neighbors … 'neighbors'"):
        retro_tasks("db-build,neighbors")


def test_settings_of_a_project_are_those_of_its_first_command(corpora):
    preprocess(corpora / "p", "--retro-tasks", "db-build")
    project = ["--retro-workdir", str(corpora / "p")]
    TOOL["main"]([*project, "--retro-tasks", "index-build,query-neighbors"])
    assert len(neighbors_of(corpora / "p", "train")) == 160
    for flags, message in (
        (("--retro-gpt-seed", "7"), "--retro-gpt-seed 7 … retro_gpt_seed 1234"),
        (("--retro-gpt-split", "98,2,0"), "--retro-gpt-split 98,2,0 … retro_gpt_split"),
        (("--retro-gpt-data-path", "first"), "--retro-gpt-data-path first … retro_gpt_data_path"),
        (("--retro-gpt-seq-length", "18"), "18 … multiple … --retro-gpt-chunk-length 4"),
        (("--retro-query-num-neighbors-save", "500"), "500 … --retro-query-num-neighbors"),
        (("--retro-index-add-load-fraction", "0"), "--retro-index-add-load-fraction 0.0 … above 0"),
        (("--retro-block-size", "0"), "--retro-block-size 0 … 1"),
    ):
        with problem(message):
            TOOL["main"]([*project, *flags])
    with problem("--retro-gpt-data-path … missing") as caught:
        TOOL["main"](["--retro-project-dir", str(corpora / "q")])
    require_problem("tokenizer-type … missing", [str(caught.value)])


def test_other_neighbors_of_a_project_have_their_own_folder(corpora):
    for saved in ("5", "3"):
        preprocess(corpora / "p", "--retro-query-num-neighbors-save", saved)
    assert len([*(corpora / "p" / "query").glob("train_*")]) == 2
    settings = json.loads((corpora / "p" / "config.json").read_text())
    folder = corpora / "p" / "query" / settings["retro_neighbor_dirs"]["train"]
    assert h5py.File(next(folder.iterdir()), "r")["neighbors"].shape[1] == 3


def test_changed_token_files_are_refused(corpora):
    preprocess(corpora / "p", "--retro-tasks", "db-build")
    with IndexedDatasetWriter(corpora / "first", "u2") as writer:
        writer.append([1, 2, 3])
    with problem("data/first.idx … changed", DataError):
        preprocess(corpora / "p")


def test_files_that_are_missing_or_share_a_name_are_refused(corpora):
    (corpora / "sub").mkdir()
    with problem("--retro-gpt-data-path … /none … none.bin"):
        preprocess(corpora / "p", "--retro-gpt-data-path", str(corpora / "none"))
    with IndexedDatasetWriter(corpora / "sub" / "first", "u2") as writer:
        writer.append([1, 2, 3])
    both = ("1", str(corpora / "first"), "1", str(corpora / "sub" / "first"))
    with problem("different names"):
        preprocess(corpora / "q", "--retro-gpt-data-path", *both)
    with problem("weights and prefixes"):
        preprocess(corpora / "r", "--retro-gpt-data-path", *both[:3])


def test_hashed_embeddings():
    embedder = HashedEmbedder(256)
    texts = ["the cat sat on the mat", "The cat sat on a mat", "an entirely different line", ""]
    vectors = embedder.embed(texts)
    assert vectors.shape == (4, 256)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose((vectors[:3] ** 2).sum(1), 1, rtol=1e-6)
    assert (vectors[3] == 0).all()
    assert vectors[0] @ vectors[1] > 0.5 > abs(vectors[0] @ vectors[2])
    np.testing.assert_array_equal(vectors[1:2], embedder.embed(texts[1:2]))
    assert embedder.embed([]).shape == (0, 256)
    assert WordCounter().count(texts) == [6, 6, 4, 0]
