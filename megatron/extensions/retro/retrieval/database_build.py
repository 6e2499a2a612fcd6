"""Build of the chunk database (db-build): documents cut into chunks, by blocks, then joined."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replace_text
from megatron.common.errors import DataError
from megatron.common.process_pool import num_workers, ordered_map
from megatron.data.token_files.indexed_dataset import IndexedDataset, open_token_files
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.retro.retrieval.blocks import Arrays, Blocks, Ranks
from megatron.extensions.retro.retrieval.chunk_database import COLUMNS, INFOS, TRAIN
from megatron.extensions.retro.retrieval.embedders import TokenCounter
from megatron.extensions.retro.retrieval.flags import RetroPreprocessingConfig
from megatron.extensions.retro.retrieval.hdf5_files import Streamed, write_streams
from megatron.extensions.retro.retrieval.project import Project
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SAMPLED = Path("db", "merged", "sampled.hdf5")
"""The chunks that train the index, from the project directory on."""

VALID = Path("db", "merged", "valid.hdf5")
"""The chunks of documents that are not of training, from the project directory on."""

_KEYS = ("chunks_valid", "chunks_invalid", "doc_offsets")
_BATCH = 2000  # chunks whose texts are in memory together
_MOST = np.iinfo(np.uint32).max

MakeCounter = Callable[[], TokenCounter]


def build_database(project: Project, make_counter: MakeCounter, ranks: Ranks) -> None:
    """Write the chunk database; the first rank joins the blocks of all.

    Args:
        make_counter: picklable; worker processes call it.

    Raises:
        DataError: token files are damaged, or a file cannot be written.

    Communication: waits for the other ranks, through files.
    """
    # Written last: where it is, the other files are complete.
    infos = project.directory / INFOS
    if not infos.exists():
        for name, dataset in zip(project.names, project.datasets, strict=True):
            compute = _compute(project, dataset, make_counter, ranks)
            _blocks_of(project, name, dataset).fill(compute, ranks)
        if ranks.is_first:
            _join(project)
    ranks.wait(lambda: "" if infos.exists() else str(infos))


def validate_database(
    project: Project, make_counter: MakeCounter, ranks: Ranks, *, fraction: float
) -> Iterator[str]:
    """Compute a fraction of the blocks again; yield a line for each of the token files.

    Raises:
        DataError: a block has other content.
    """
    for name, dataset in zip(project.names, project.datasets, strict=True):
        compute = _compute(project, dataset, make_counter, ranks)
        yield _blocks_of(project, name, dataset).validate(compute, ranks, fraction=fraction)


def cut_documents(
    documents: range,
    *,
    dataset: IndexedDataset,
    tokenizer: Tokenizer,
    counter: TokenCounter,
    chunk_length: int,
) -> dict[str, NDArray]:
    """Cut documents, without their EOD, into chunks of `chunk_length` tokens or, at their end, fewer.

    Shapes: -> chunks_valid and chunks_invalid [chunks, 4] uint32: document, first token, token after
        the last, tokens of the embedder; doc_offsets [documents, 2] uint64: document, valid chunks
        up to its end.
    """
    rows: list[tuple[int, int, int]] = []
    texts: list[str] = []
    counts: list[int] = []
    for document in documents:
        tokens = dataset.get(document)
        if len(tokens) and tokens[-1] == tokenizer.eod:
            tokens = tokens[:-1]
        for start in range(0, len(tokens), chunk_length):
            piece = tokens[start : start + chunk_length]
            rows.append((document, start, start + len(piece)))
            texts.append(text_of(piece, tokenizer))
        if len(texts) >= _BATCH:
            counts += counter.count(texts)
            texts.clear()
    counts += counter.count(texts)
    chunks = np.array(rows, np.uint32).reshape(-1, 3)
    chunks = np.column_stack([chunks, np.array(counts, np.uint32)])
    is_valid = chunks[:, 3] > 0
    valid = chunks[is_valid]
    ends = np.searchsorted(valid[:, 0], np.arange(documents.start, documents.stop), side="right")
    offsets = np.column_stack([np.arange(documents.start, documents.stop), ends])
    return {
        "chunks_valid": valid,
        "chunks_invalid": chunks[~is_valid],
        "doc_offsets": offsets.astype(np.uint64),
    }


def text_of(tokens: NDArray, tokenizer: Tokenizer) -> str:
    """Return the text of tokens, without ends of documents."""
    return tokenizer.decode(tokens[tokens != tokenizer.eod].tolist())


def _compute(
    project: Project, dataset: IndexedDataset, make_counter: MakeCounter, ranks: Ranks
) -> Callable[[range], Arrays]:
    config: RetroPreprocessingConfig = project.config
    cut = partial(
        _cut_in_process,
        prefix=dataset.prefix,
        arguments=project.tokenizer_arguments,
        make_counter=make_counter,
        chunk_length=config.retro_gpt_chunk_length,
    )

    def compute(documents: range) -> Arrays:
        num_bytes = int(dataset.sizes[documents.start : documents.stop].sum()) * 4
        workers = num_workers(num_bytes, config.retro_workers or ranks.num_cores)
        step = -(-len(documents) // workers)
        shares = [documents[first : first + step] for first in range(0, len(documents), step)]
        return _join_arrays([*ordered_map(cut, shares, workers)])

    return compute


def _cut_in_process(
    documents: range, *, prefix: str, arguments: dict, make_counter: MakeCounter, chunk_length: int
) -> dict[str, NDArray]:
    return cut_documents(
        documents,
        dataset=open_token_files(prefix),
        tokenizer=build_tokenizer(**arguments),
        counter=make_counter(),
        chunk_length=chunk_length,
    )


def _join_arrays(parts: Sequence[dict[str, NDArray]]) -> dict[str, NDArray]:
    """Join the arrays of consecutive ranges of documents."""
    before = 0
    for part in parts:
        part["doc_offsets"][:, 1] += np.uint64(before)
        before += len(part["chunks_valid"])
    return {key: np.concatenate([part[key] for part in parts]) for key in _KEYS}


def _blocks_of(project: Project, name: str, dataset: IndexedDataset) -> Blocks:
    config: RetroPreprocessingConfig = project.config
    require_uint32(len(dataset), f"number of documents of {dataset.prefix}")
    require_uint32(int(dataset.sizes.max(initial=0)), f"tokens of a document of {dataset.prefix}")

    def is_valid(documents: range, arrays: Arrays) -> bool:
        valid, invalid, offsets = (arrays[key] for key in _KEYS)
        return (
            valid.ndim == invalid.ndim == 2
            and valid.shape[1] == invalid.shape[1] == COLUMNS - 1
            and offsets.shape == (len(documents), 2)
            and len(valid) == offsets[-1, 1]
        )

    return Blocks(
        project.directory / "db" / "individual" / name,
        num_rows=len(dataset),
        size=config.retro_doc_block_size,
        keys=_KEYS,
        is_valid=is_valid,
    )


def require_uint32(value: int, what: str) -> None:
    """Refuse a number that the files of the database cannot hold.

    Raises:
        DataError: `value` is above 2**32 - 1.
    """
    if value > _MOST:
        raise DataError(
            f"{what}: {value} does not fit the 32 bits of the files of the database; divide the "
            "token files"
        )


class _Part:
    """Chunks of one of the token files; chunks of training documents are separate."""

    def __init__(self, number: int, name: str, dataset: IndexedDataset, blocks: Blocks, bound: int):
        self.number, self.name, self.dataset, self._blocks = number, name, dataset, blocks
        self.bound = bound
        self.num_chunks = self.num_invalid = self.num_train = 0
        for arrays in blocks:
            valid = arrays["chunks_valid"]
            self.num_chunks += len(valid)
            self.num_invalid += len(arrays["chunks_invalid"])
            self.num_train += int(np.searchsorted(valid[:, 0], bound))

    def chunks(self, *, is_training: bool) -> Iterator[NDArray]:
        """Yield the chunks of documents before or from the bound on. Shapes: [chunks, 5]."""
        for arrays in self._blocks:
            valid = arrays["chunks_valid"]
            in_training = valid[:, 0] < self.bound
            rows = valid[in_training if is_training else ~in_training]
            numbers = np.full(len(rows), self.number, np.uint32)
            yield np.column_stack([numbers, rows])

    def offsets(self, before: int) -> Iterator[NDArray]:
        """Yield number, document and running count of chunks of each document for training.

        Args:
            before: chunks of the parts before this one.
        """
        for arrays in self._blocks:
            offsets = arrays["doc_offsets"]
            rows = offsets[offsets[:, 0] < self.bound].astype(np.uint64)
            rows[:, 1] += np.uint64(before)
            before += int(offsets[-1, 1])
            yield np.column_stack([np.full(len(rows), self.number, np.uint64), rows])


def _join(project: Project) -> None:
    """Write the files of all chunks from the blocks of all token files."""
    config: RetroPreprocessingConfig = project.config
    parts = [
        _Part(
            number,
            name,
            dataset,
            _blocks_of(project, name, dataset),
            project.num_training_documents(dataset),
        )
        for number, (name, dataset) in enumerate(zip(project.names, project.datasets, strict=True))
    ]
    total = sum(part.num_train for part in parts)
    require_uint32(total, "number of chunks of documents for training")
    if not total:
        raise DataError(
            f"--retro-gpt-split {config.retro_gpt_split} leaves no chunk of text for training: the "
            "database would be empty"
        )
    directory = project.directory
    with write_errors_name(directory / TRAIN):
        (directory / TRAIN).parent.mkdir(parents=True, exist_ok=True)
    wanted = total if config.retro_index_ntrain is None else config.retro_index_ntrain
    counts = [
        min(part.num_train, int(wanted * ratio))
        for part, ratio in zip(parts, project.ratios, strict=True)
    ]
    if config.retro_index_ntrain is None:
        counts = [part.num_train for part in parts]
    elif sum(counts) < int(wanted * 0.99):
        log.warning(
            "--retro-index-ntrain %d: the shares of the token files have %d chunks",
            *(wanted, sum(counts)),
        )
    _write_chunks(directory / SAMPLED, _sample(parts, counts, seed=config.retro_gpt_seed))
    _write_chunks(directory / VALID, _chunks(parts, is_training=False))
    num_documents = sum(part.bound for part in parts)
    train = _chunks(parts, is_training=True)
    firsts = [0, *accumulate(part.num_train for part in parts)]
    rows = (piece for part in parts for piece in part.offsets(firsts[part.number]))
    offsets = Streamed((num_documents, 3), np.uint64, rows)
    _write_chunks(directory / TRAIN, train, doc_offsets=offsets)
    infos = [
        {
            "prefix": part.name,
            "ratio": ratio,
            "n_docs": len(part.dataset),
            "n_docs_train": part.bound,
            "n_chunks": part.num_chunks,
            "n_chunks_train": part.num_train,
            "n_chunks_invalid": part.num_invalid,
            "n_chunks_sampled": count,
        }
        for part, ratio, count in zip(parts, project.ratios, counts, strict=True)
    ]
    with write_errors_name(directory / INFOS):
        replace_text(directory / INFOS, json.dumps(infos, indent=2) + "\n", is_flushed=True)


def _chunks(parts: Sequence[_Part], *, is_training: bool) -> Streamed:
    size = sum(
        part.num_train if is_training else part.num_chunks - part.num_train for part in parts
    )
    pieces = (piece for part in parts for piece in part.chunks(is_training=is_training))
    return Streamed((size, COLUMNS), np.uint32, pieces)


def _sample(parts: Sequence[_Part], counts: Sequence[int], *, seed: int) -> Streamed:
    """Return a sample without replacement of each part's chunks for training, in their order.

    Randomness: numpy.random.Generator(PCG64([seed, number of the part])).
    """

    def pieces() -> Iterator[NDArray]:
        for part, count in zip(parts, counts, strict=True):
            rng = np.random.Generator(np.random.PCG64([seed, part.number]))
            chosen = np.sort(rng.choice(part.num_train, count, replace=False, shuffle=False))
            before = 0
            for piece in part.chunks(is_training=True):
                first, last = np.searchsorted(chosen, [before, before + len(piece)])
                yield piece[chosen[first:last] - before]
                before += len(piece)

    return Streamed((sum(counts), COLUMNS), np.uint32, pieces())


def _write_chunks(file: Path, chunks: Streamed, **further: Streamed) -> None:
    count = np.array([chunks.shape[0]], np.int64)
    n_written = Streamed((1,), np.int64, [count])
    write_streams(file, {"chunks": chunks, "n_written": n_written, **further})
