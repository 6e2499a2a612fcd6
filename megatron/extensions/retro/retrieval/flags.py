"""Retro preprocessing: flags of the database, the index and the neighbors, and their checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron.common.errors import ConfigError
from megatron.config.data.corpora import SampleOrder
from megatron.config.parsing.declaration import range_problems, setting
from megatron.config.parsing.flags import Legacy

TASKS = ("db-build", "index-train", "index-add", "query-neighbors")
"""Tasks in the order in which each needs the files of those before it."""

_SEVERAL: Mapping[str, tuple[str, ...]] = {
    "build": TASKS,
    "index-build": ("index-train", "index-add"),
    "query-pretraining-neighbors": ("query-neighbors",),
    "pretraining-query-neighbors": ("query-neighbors",),
}
"""Names that stand for several tasks, and older names."""


@dataclass(frozen=True, kw_only=True)
class RetroPreprocessingConfig:
    """Retro preprocessing: database of chunks, index, and neighbors of all samples of a run."""

    retro_project_dir: str = setting(older=("--retro-workdir",))
    """Directory of the project. Settings of its first command are kept in its config.json, and are
    the defaults of those that follow."""

    retro_tasks: str = "build"
    """Tasks, with commas between them: db-build, index-train, index-add, query-neighbors;
    index-build is the second and third, build is all."""

    retro_task_validate: float | None = None
    """Compute this fraction of the blocks of the tasks again and compare them bit by bit, instead of
    writing files."""

    retro_timeout_s: int = setting(36_000, at_least=1)
    """Seconds that a process waits for other processes' files while nothing changes."""

    retro_workers: int | None = setting(None, at_least=1)
    """Processes that cut documents into chunks, of each rank (default: as many as it has CPU cores,
    and fewer for little data)."""

    retro_block_size: int = setting(100_000, at_least=1)
    """Chunks of a block of embeddings, codes or neighbors. Ranks share out blocks, and a restart
    skips finished ones."""

    retro_doc_block_size: int = setting(100_000, at_least=1)
    """Documents of a block of the database."""

    retro_gpt_seed: int = 1234
    """Seed of training (--seed), and of the sample of chunks that trains the index."""

    retro_gpt_data_path: list[str] | None = None
    """Token files of training (--data-path); those outside of DIR/data get a link there."""

    retro_gpt_data_cache_path: str | None = None
    """Directory of index maps (--data-cache-path) of training, relative to the project directory."""

    retro_gpt_split: str = "969,30,1"
    """Split of training (--split). The database has the documents of its training part alone."""

    retro_gpt_sample_order: SampleOrder = "bigscience"
    """Sample order of training (--sample-order)."""

    retro_gpt_train_samples: int | None = setting(None, at_least=1, older=("--train-samples",))
    """Samples of training (--train-samples)."""

    retro_gpt_eval_interval: int = setting(1000, at_least=1)
    """Steps between evaluations in training (--eval-interval)."""

    retro_gpt_eval_iters: int = setting(100, at_least=0)
    """Steps of an evaluation in training (--eval-iters)."""

    retro_gpt_global_batch_size: int | None = setting(None, at_least=1)
    """Batch of training (--global-batch-size)."""

    retro_gpt_seq_length: int | None = setting(None, at_least=1)
    """Length of samples of training (--seq-length), a multiple of --retro-gpt-chunk-length."""

    retro_gpt_chunk_length: int = setting(64, at_least=1)
    """Tokens of a chunk, of samples and of the database."""

    retro_gpt_tokenizer_type: str | None = None
    """Tokenizer of the token files and of training (--tokenizer-type)."""

    retro_gpt_tokenizer_model: str | None = None
    """Model of the tokenizer (--tokenizer-model); it is copied to DIR/tokenizer."""

    retro_gpt_vocab_file: str | None = None
    """Vocabulary of the tokenizer (--vocab-file); it is copied to DIR/tokenizer."""

    retro_gpt_merge_file: str | None = None
    """Merges of the tokenizer (--merge-file); the file is copied to DIR/tokenizer."""

    retro_gpt_vocab_size: int | None = None
    """Tokens of a NullTokenizer (--vocab-size)."""

    bert_embedder_type: Literal["hashed", "megatron", "huggingface"] = "hashed"
    """Embedder of texts: hashed counts words and pairs of words by their hash, and needs
    no weights; megatron is a checkpoint of pretrain_bert.py; huggingface is an encoder in
    transformers' format."""

    bert_load: str | None = setting(None, older=("--load",))
    """Directory of the checkpoint or the encoder of --bert-embedder-type megatron or huggingface."""

    retro_bert_tokenizer_type: str | None = None
    """Tokenizer of BERT (default: as its checkpoint was trained)."""

    retro_bert_vocab_file: str | None = None
    """Vocabulary of the tokenizer of BERT (default: as its checkpoint was trained); it is copied to
    DIR/tokenizer."""

    retro_bert_batch_size: int = setting(128, at_least=1)
    """Chunks in a batch of BERT."""

    retro_bert_max_chunk_length: int = setting(256, at_least=3, remedy=": [CLS], a token and [SEP]")
    """Tokens of a chunk that BERT reads, with [CLS] and [SEP]."""

    retro_hashed_width: int = setting(1024, at_least=1)
    """Features of the vectors of --bert-embedder-type hashed."""

    retro_index_type: Literal["faiss-par-add", "faiss-base"] = "faiss-par-add"
    """How chunks are added to the index: faiss-par-add lets all ranks encode them; faiss-base adds
    their embeddings as they are, which every kind of index can."""

    retro_index_str: str = "Flat"
    """Kind of the index, as faiss.index_factory reads it, such as OPQ32_64,IVF65536_HNSW8,PQ32;
    Flat is exact and needs no training."""

    retro_index_ntrain: int | None = setting(None, at_least=1)
    """Chunks that train the index, a seeded sample of the database (default: all)."""

    retro_index_train_load_fraction: float = 1.0
    """Fraction of the sample that trains the index."""

    retro_index_add_load_fraction: float = 1.0
    """Fraction of the chunks of the database that are added to the index."""

    retro_index_delete_training_embeddings: bool = setting(
        True, older=("--retro-index-no-delete-training-embeddings",)
    )
    """Keep the embeddings of the sample after the index is trained."""

    retro_index_delete_added_codes: bool = setting(
        True, older=("--retro-index-no-delete-added-codes",)
    )
    """Keep the blocks of codes after they are added to the index."""

    retro_query_ef_search: int = setting(256, at_least=1)
    """Candidates that the search in an HNSW graph keeps, for indices with one."""

    retro_query_nprobe: int = setting(65_536, at_least=1)
    """Lists that a search looks at, for indices with lists."""

    retro_query_num_neighbors_query: int = setting(200, at_least=1)
    """Nearest chunks to search for, before chunks of the sample's documents are dropped."""

    retro_query_num_neighbors_save: int = setting(20, at_least=1)
    """Neighbors that are stored for each chunk; missing ones are -1."""


@dataclass(frozen=True, kw_only=True)
class RetroRecallConfig:
    """Recall of the index of a Retro project."""

    recall_at: list[int] = setting(factory=lambda: [1, 2, 10, 20], at_least=1)
    """Numbers of neighbors k to print the recall of."""

    recall_queries: int = setting(1000, at_least=1)
    """Chunks that are searched for, of documents that are not in the database."""

    recall_nprobe: list[int] | None = setting(None, at_least=1)
    """Values of --retro-query-nprobe to compare (default: that one)."""


_OF_BERT = "no effect: the network of BERT comes from its checkpoint"
_OF_TRAINING = "no effect: preprocessing trains nothing"
_OF_GPT = "no effect here: --retro-gpt-{0} sets it"

RETRO_LEGACY = (
    *(
        Legacy(f"--{name}", _OF_BERT, takes=1)
        for name in (
            *("num-layers", "hidden-size", "num-attention-heads", "seq-length"),
            *("max-position-embeddings", "tokenizer-type", "vocab-file"),
        )
    ),
    *(
        Legacy(f"--{name}", _OF_TRAINING, takes=1)
        for name in (
            *("tensor-model-parallel-size", "pipeline-model-parallel-size", "lr", "min-lr"),
            *("lr-decay-style", "lr-decay-samples", "lr-warmup-samples", "weight-decay"),
            *("clip-grad", "distributed-backend", "distributed-timeout-minutes"),
            *("dataloader-type", "micro-batch-size", "num-workers", "log-interval"),
        )
    ),
    *(
        Legacy(f"--{name}", _OF_TRAINING)
        for name in (
            *("no-load-optim", "no-load-rng", "exit-on-missing-checkpoint", "no-data-sharding"),
            *("no-gradient-accumulation-fusion", "no-async-tensor-model-parallel-allreduce"),
            *("output-bert-embeddings", "retro-return-doc-ids", "fp16", "bf16"),
        )
    ),
    Legacy("--data-path", _OF_GPT.format("data-path"), takes="+"),
    *(
        Legacy(f"--{name}", _OF_GPT.format(name), takes=1)
        for name in ("split", "eval-interval", "eval-iters", "global-batch-size")
    ),
)
"""Flags of Megatron-LM's preprocessing without effect here."""

_FREE = (
    *("retro_project_dir", "retro_tasks", "retro_task_validate", "retro_timeout_s"),
    *("retro_workers", "retro_bert_batch_size", "retro_index_type", "retro_index_str"),
    *("retro_index_train_load_fraction", "retro_index_add_load_fraction"),
    *("retro_index_delete_training_embeddings", "retro_index_delete_added_codes"),
    *("retro_query_ef_search", "retro_query_nprobe"),
    *("retro_query_num_neighbors_query", "retro_query_num_neighbors_save"),
)
"""Fields that two commands of one project may give differently."""

KEPT = tuple(each.name for each in fields(RetroPreprocessingConfig) if each.name not in _FREE)
"""Fields whose values config.json keeps."""


def retro_tasks(names: str) -> tuple[str, ...]:
    """Return the tasks that `names` stand for, in order, each once.

    Raises:
        ConfigError: one is unknown.

    >>> retro_tasks("query-neighbors,index-build")
    ('index-train', 'index-add', 'query-neighbors')
    """
    found: set[str] = set()
    for name in names.split(","):
        tasks = (name,) if name in TASKS else _SEVERAL.get(name, ())
        if not tasks:
            raise ConfigError(
                f"--retro-tasks {names}: {name!r} is not one of {', '.join((*TASKS, *_SEVERAL))}"
            )
        found.update(tasks)
    return tuple(task for task in TASKS if task in found)


def retro_preprocessing_problems(config: RetroPreprocessingConfig) -> Iterator[str]:
    """Yield every reason why a project cannot be preprocessed."""
    needed = {
        "--retro-gpt-data-path": config.retro_gpt_data_path,
        "--retro-gpt-tokenizer-type": config.retro_gpt_tokenizer_type,
        "--retro-gpt-seq-length": config.retro_gpt_seq_length,
        "--retro-gpt-train-samples": config.retro_gpt_train_samples,
        "--retro-gpt-global-batch-size": config.retro_gpt_global_batch_size,
    }
    for flag, value in needed.items():
        if value is None:
            yield (
                f"{flag} is missing: the first command for --retro-project-dir "
                f"{config.retro_project_dir} needs it"
            )
    yield from range_problems(config)
    yield from _fraction_problems(config)
    yield from _embedder_problems(config)
    length, chunk = config.retro_gpt_seq_length or 0, config.retro_gpt_chunk_length
    if chunk > 0 and length % chunk:
        yield (
            f"--retro-gpt-seq-length {length} is not a multiple of --retro-gpt-chunk-length {chunk}"
        )
    saved, searched = (
        config.retro_query_num_neighbors_save,
        config.retro_query_num_neighbors_query,
    )
    if saved > searched:
        yield (
            f"--retro-query-num-neighbors-save {saved} is more than "
            f"--retro-query-num-neighbors-query {searched}"
        )


def retro_recall_problems(config: RetroRecallConfig) -> Iterator[str]:
    """Yield every reason why the recall of an index cannot be measured."""
    yield from range_problems(config)


def _embedder_problems(config: RetroPreprocessingConfig) -> Iterator[str]:
    kind = config.bert_embedder_type
    needs_bert = {
        "--bert-load": config.bert_load,
        "--retro-bert-tokenizer-type": config.retro_bert_tokenizer_type,
        "--retro-bert-vocab-file": config.retro_bert_vocab_file,
    }
    if kind != "hashed" and config.bert_load is None:
        yield f"--bert-embedder-type {kind} needs --bert-load, the directory of the encoder"
    for flag, value in needs_bert.items():
        if kind == "hashed" and value is not None:
            yield f"{flag} {value} is for --bert-embedder-type megatron or huggingface"
        elif kind == "huggingface" and value is not None and flag != "--bert-load":
            yield f"{flag} {value}: --bert-embedder-type huggingface has a tokenizer in --bert-load"


def _fraction_problems(config: RetroPreprocessingConfig) -> Iterator[str]:
    fractions = {
        "--retro-task-validate": config.retro_task_validate,
        "--retro-index-train-load-fraction": config.retro_index_train_load_fraction,
        "--retro-index-add-load-fraction": config.retro_index_add_load_fraction,
    }
    for flag, fraction in fractions.items():
        if fraction is not None and not 0 < fraction <= 1:
            yield f"{flag} {fraction} must be above 0 and at most 1"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def contradictions_with(
    kept: Mapping[str, Any], saved: Mapping[str, Any], file: object
) -> Iterator[str]:
    """Yield the settings of a command that differ from the project's.

    Args:
        kept: settings of the command, by the names of KEPT.
        saved: the content of config.json, which `file` names.
    """
    for name, value in kept.items():
        if name in saved and saved[name] != value:
            yield (
                f"{_flag(name)} {_words(value)} contradicts {name} {_words(saved[name])} in {file}: "
                "leave the flag out, or give another --retro-project-dir"
            )


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
