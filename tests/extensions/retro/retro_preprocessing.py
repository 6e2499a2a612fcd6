"""Retro preprocessing of small corpora, on ranks that are threads, or in processes that are killed."""

import ast
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from source import REPOSITORY

from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter
from megatron.extensions.retro.embedders import counter_of, embedder_of
from megatron.extensions.retro.retrieval.blocks import Ranks
from megatron.extensions.retro.retrieval.flags import RetroPreprocessingConfig, retro_tasks
from megatron.extensions.retro.retrieval.project import prepare_project, read_retro_flags
from megatron.extensions.retro.retrieval.retro_tasks import run_tasks
from megatron.training.process.environment import Launch

h5py = pytest.importorskip("h5py")
faiss = pytest.importorskip("faiss")

TOOL = run_path(str(REPOSITORY / "tools" / "retro" / "preprocess_data.py"))

RECALL = run_path(str(REPOSITORY / "tools" / "retro" / "recall.py"))

EOD = 200
CHUNK = 4
COPIED = 30
"""Documents d of which the corpus has a second one, d + COPIED, that is nearly equal."""


def write_corpora(folder: Path) -> None:
    """Write a corpus of random documents, the copies of some, and another one.

    With their ends, documents are some chunks long: chunks of samples are those of the database.
    """
    draw = np.random.RandomState(0)

    def documents(count: int) -> list[np.ndarray]:
        return [draw.randint(0, EOD, CHUNK * draw.randint(2, 8) - 1) for _ in range(count)]

    originals = documents(COPIED)
    copies = [document.copy() for document in originals]
    for copy in copies:
        copy[::CHUNK] = draw.randint(0, EOD, len(copy[::CHUNK]))  # one token of each chunk
    for name, texts in (
        ("first", [*originals, *copies, *documents(70)]),
        ("second", [*documents(40), [3] * 19]),
    ):
        with IndexedDatasetWriter(folder / name, "u2") as writer:
            for text in texts:
                writer.append([*text, EOD])


def words_for(project: Path, *flags: str) -> list[str]:
    """Return the command line for the corpora beside `project`."""
    folder = project.parent
    return [
        *("--retro-project-dir", str(project), "--retro-gpt-data-path"),
        *("0.7", str(folder / "first"), "0.3", str(folder / "second")),
        *("--retro-gpt-tokenizer-type", "NullTokenizer", "--retro-gpt-vocab-size", str(EOD)),
        *("--retro-gpt-split", "80,20,0", "--retro-gpt-train-samples", "40"),
        *("--retro-gpt-eval-interval", "5", "--retro-gpt-eval-iters", "1"),
        *("--retro-gpt-global-batch-size", "4", "--retro-gpt-seq-length", "16"),
        *("--retro-gpt-chunk-length", str(CHUNK), "--retro-hashed-width", "256"),
        *("--retro-block-size", "70", "--retro-doc-block-size", "31"),
        *("--retro-query-num-neighbors-query", "12", "--retro-query-num-neighbors-save", "5"),
        *flags,
    ]


def config_of(project: Path, *flags: str) -> RetroPreprocessingConfig:
    """Return the settings of the command line."""
    return read_retro_flags(words_for(project, *flags), description="").sections["retro"]


def preprocess(project: Path, *flags: str, size: int = 1) -> None:
    """Run the tasks of the command line on ranks that are threads."""
    config = config_of(project, *flags)

    def run(rank: int) -> None:
        ranks = Ranks(rank, size, timeout_s=60)
        project = prepare_project(config, ranks)
        for _ in run_tasks(
            project,
            retro_tasks(config.retro_tasks),
            ranks,
            make_counter=counter_of(project),
            make_embedder=embedder_of(project, Launch(rank, size, rank, size)),
        ):
            continue

    parse, lock = ast.literal_eval, threading.Lock()

    def parse_alone(text: str) -> Any:
        # numpy parses headers with it, and Python 3.11 counts the depth of all threads together.
        with lock:
            return parse(text)

    with patch.object(ast, "literal_eval", parse_alone), ThreadPoolExecutor(size) as pool:
        for _ in pool.map(run, range(size)):
            continue


def preprocess_and_die(project: str, after: int) -> None:
    """Run all tasks in a process that is killed at its `after`-th rename of a file."""
    rename, count = os.replace, 0

    def killing(*names: str) -> None:
        nonlocal count
        count += 1
        if count == after:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*names)

    os.replace = killing  # type: ignore[assignment]
    preprocess(Path(project))


def tables(project: Path) -> dict[str, np.ndarray]:
    """Return all arrays of the database and of the neighbors, by file and key."""
    found = {}
    for file in sorted(project.rglob("*.hdf5")):
        with h5py.File(file, "r") as opened:
            for key in opened:
                found[f"{file.relative_to(project)} {key}"] = opened[key][...]
    return found


def chunks_of(project: Path, name: str = "train") -> np.ndarray:
    """Return the chunks of a file of the database."""
    with h5py.File(project / "db" / "merged" / f"{name}.hdf5", "r") as file:
        return file["chunks"][...]


def neighbors_of(project: Path, role: str) -> np.ndarray:
    """Return the neighbors of all chunks of the samples of `role`."""
    (folder,) = (project / "query").glob(f"{role}_*")
    blocks = [h5py.File(file, "r")["neighbors"][...] for file in sorted(folder.iterdir())]
    return np.concatenate(blocks)
