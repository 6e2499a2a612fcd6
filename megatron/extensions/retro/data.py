"""Samples of Retro: a GPT's samples, with the tokens of retrieved neighbors of each chunk."""

import logging

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError, WrongDataError
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.data.datasets.run_datasets import RoleView, View
from megatron.data.sampling.provenance import Origin, TracedSource
from megatron.extensions.retro.project_settings import RetroPlan, read_retro_project
from megatron.extensions.retro.retrieval.chunk_database import ChunkDatabase
from megatron.extensions.retro.retrieval.hdf5_files import BlockedRows
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class RetroDataset:
    """Adds neighbors to the samples of another dataset.

    Rows i * c to (i + 1) * c - 1 of the neighbors belong to the c chunks of sample i. Where samples
    outnumber neighbors, they repeat from the first on.

    Args:
        dataset: as preprocessing saw it.
        neighbors: numbers of chunks of `database`, nearest first; -1 for none.
        num_neighbors: how many are taken.
        num_chunks: c.
        vocab_size: tokens are less than this.

    Shapes: dataset[i] -> {"tokens": [s + 1], "neighbor_tokens": [c, k, r], "neighbor_lengths":
        [c, k]} int64.
    """

    def __init__(
        self,
        dataset: TracedSource,
        *,
        neighbors: BlockedRows,
        database: ChunkDatabase,
        num_neighbors: int,
        num_chunks: int,
        vocab_size: int,
    ):
        self.dataset = dataset
        self._neighbors, self._database = neighbors, database
        self._num_neighbors, self._num_chunks = num_neighbors, num_chunks
        self._vocab_size = vocab_size
        self._num_queried = len(neighbors) // num_chunks

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        sample = i % self._num_queried
        rows = self._neighbors.rows(sample * self._num_chunks, (sample + 1) * self._num_chunks)
        if rows.shape[1] < self._num_neighbors:
            raise WrongDataError(
                f"--retro-num-neighbors {self._num_neighbors}: {self._neighbors.folder} has "
                f"{rows.shape[1]} for each chunk"
            )
        found = [
            self._retrieve(number) for number in rows[:, : self._num_neighbors].ravel().tolist()
        ]
        shape = self._num_chunks, self._num_neighbors
        return {
            **self.dataset[sample],
            "neighbor_tokens": np.stack([tokens for tokens, _ in found]).reshape(*shape, -1),
            "neighbor_lengths": np.array([length for _, length in found], np.int64).reshape(shape),
        }

    def origin(self, i: int) -> Origin:
        """Return the token spans of sample i on disk, without its neighbors."""
        return self.dataset.origin(i % self._num_queried)

    def _retrieve(self, number: int) -> tuple[NDArray, int]:
        tokens, length = self._database.retrieve(number)
        if length and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise DataError(
                f"chunk {number} of {self._database.file} has a token that is not in the vocabulary of "
                f"{self._vocab_size} tokens: its token file is damaged, or was made with another "
                "tokenizer than the one of this run"
            )
        return tokens, length


def retro_view(plan: RetroPlan, *, pad: int, vocab_size: int) -> RoleView:
    """Return the view that adds neighbors to the samples of a dataset.

    Args:
        pad: the token after the last real one of a neighbor.

    Raises:
        ConfigError: the project directory names no neighbors.
        DataError: files are missing or damaged.
    """
    project = read_retro_project(plan.project_dir)
    database = ChunkDatabase(
        project.directory,
        chunk_length=plan.chunk_length,
        num_chunks=plan.num_retrieved_chunks,
        pad=pad,
    )

    def of(role: str, num_samples: int) -> View:
        neighbors = BlockedRows(project.neighbor_directory(role), "neighbors")
        _require_enough(neighbors, plan.num_chunks, num_samples, verifies=plan.verifies_count)

        def view(dataset: TracedSource) -> RetroDataset:
            return RetroDataset(
                dataset,
                neighbors=neighbors,
                database=database,
                num_neighbors=plan.num_neighbors,
                num_chunks=plan.num_chunks,
                vocab_size=vocab_size,
            )

        return view

    return RoleView(of)


def _require_enough(
    neighbors: BlockedRows, num_chunks: int, num_samples: int, *, verifies: bool
) -> None:
    """Refuse neighbors that do not belong to these samples.

    Raises:
        WrongDataError: there are none for some samples.
    """
    rows, needed = len(neighbors), num_chunks * num_samples
    folder = neighbors.folder
    if rows < num_chunks or (verifies and (rows < needed or rows % num_chunks)):
        raise WrongDataError(
            f"{folder} has neighbors of {rows} chunks, and the {num_samples} samples of this run have "
            f"{needed} ({num_chunks} each): query the others, or let samples repeat with "
            "--retro-no-verify-neighbor-count"
        )
    if rows < needed:
        log.warning(
            "%s has neighbors of %d samples: the %d samples of this run repeat them",
            *(folder, rows // num_chunks, num_samples),
        )


def view_of_neighbors(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> RoleView:
    """Return the view of an objective that reads neighbors; see `retro_view`."""
    return retro_view(objective.own, pad=tokenizer.eod, vocab_size=tokenizer.vocab_size)
