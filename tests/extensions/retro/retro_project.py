"""Small Retro projects: token files, database, settings and neighbors as preprocessing leaves them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.config.config import parse_config
from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

h5py = pytest.importorskip("h5py")

EOD = 60
"""The end of a document, of a NullTokenizer of as many tokens."""

SETTINGS: dict[str, Any] = {
    "retro_gpt_seed": 1234,
    "retro_gpt_data_path": ["corpus"],
    "retro_gpt_split": "80,20,0",
    "retro_gpt_train_samples": 16,
    "retro_gpt_eval_interval": 2,
    "retro_gpt_eval_iters": 1,
    "retro_gpt_tokenizer_type": "NullTokenizer",
    "retro_gpt_seq_length": 16,
    "retro_gpt_global_batch_size": 4,
    "retro_gpt_chunk_length": 4,
}

Find = Callable[[NDArray, NDArray], NDArray]
"""Returns the numbers of the nearest chunks [n, width], given chunks of samples [n, m] and of the
database [N, m]."""


def nearest(queries: NDArray, chunks: NDArray, *, width: int = 3) -> NDArray:
    """Return the chunks with most equal tokens, the first ones of equals."""
    equal = (queries[:, None] == chunks[None]).sum(-1)
    return np.argsort(-equal, axis=1, kind="stable")[:, :width]


def write_project(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    find: Find = nearest,
    block: int = 10,
    **settings: Any,
) -> Path:
    """Write a project of `documents`, without their ends; return its directory.

    Args:
        block: rows of a file of neighbors.
        settings: entries of config.json that differ from SETTINGS.
    """
    settings = SETTINGS | settings
    m = settings["retro_gpt_chunk_length"]
    (folder / "data").mkdir(parents=True)
    (folder / "db" / "merged").mkdir(parents=True)
    with IndexedDatasetWriter(folder / "data" / "corpus", "i4") as writer:
        tokens = [token for document in documents for token in (*document, EOD)]
        writer.append(np.array(tokens), [len(document) + 1 for document in documents])
    infos = [{"prefix": "corpus", "n_docs": len(documents)}]
    (folder / "db" / "indexed_dataset_infos.json").write_text(json.dumps(infos))
    rows, chunks = [], []
    for number, document in enumerate(documents):
        for start in range(0, len(document), m):
            piece = document[start : start + m]
            rows.append([0, number, start, start + len(piece), len(piece)])
            chunks.append([*piece, *[EOD] * (m - len(piece))])
    with h5py.File(folder / "db" / "merged" / "train.hdf5", "w") as file:
        file.create_dataset("chunks", data=np.array(rows, np.uint32))
    write_settings(folder, settings)
    directories = {}
    for role, samples in samples_of(folder, settings).items():
        queries = samples[:, :-1].reshape(-1, m)
        directories[role] = f"{role}_0123"
        write_neighbors(
            folder / "query" / directories[role], find(queries, np.array(chunks)), block=block
        )
    write_settings(folder, settings | {"retro_neighbor_dirs": directories})
    return folder


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings))


def write_neighbors(folder: Path, neighbors: NDArray, *, block: int) -> None:
    """Write rows of neighbors in files of `block` rows."""
    folder.mkdir(parents=True)
    for start in range(0, len(neighbors), block):
        rows = neighbors[start : start + block].astype(np.int64)
        with h5py.File(folder / f"{start:05}-{start + len(rows):05}.hdf5", "w") as file:
            # In chunks of HDF5 every other time, as files of growing arrays are.
            file.create_dataset("neighbors", data=rows, chunks=start // block % 2 == 1 or None)


def samples_of(folder: Path, settings: dict[str, Any]) -> dict[str, NDArray]:
    """Return the tokens [samples, s + 1] that a run of the project takes, by role."""
    flags = ["--num-layers", "6", "--hidden-size", "8", "--num-attention-heads", "2", "--lr", "1"]
    flags += ["--micro-batch-size", "1", "--vocab-size", str(EOD)]
    config, _ = parse_config([*flags, "--retro-project-dir", str(folder)])
    plan = plan_samples(config, world_size=1)
    sets = build_datasets(
        plan.data, seq_length=plan.seq_length, seed=settings["retro_gpt_seed"], view=None
    )
    every = {"train": sets.train, **sets.valid, **sets.test}
    wanted = {
        each.name: each.num_samples for each in (plan.data.train, *plan.data.valid, *plan.data.test)
    }
    return {
        role: np.stack([dataset[i]["tokens"] for i in range(wanted[role])])
        for role, dataset in every.items()
    }


def random_documents(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Return documents of random tokens."""
    draw = np.random.RandomState(seed)
    return [draw.randint(1, EOD, draw.randint(5, longest)).tolist() for _ in range(count)]
