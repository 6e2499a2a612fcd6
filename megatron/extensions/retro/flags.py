"""Retro, a GPT that attends to retrieved neighbors: flags, resolution and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.config import Config
from megatron.config.data.masks import MaskConfig
from megatron.config.network.model import ModelConfig
from megatron.config.network.model_problems import flag_problems, unbuilt_flags
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parsing.declaration import range_problems, resolve, setting
from megatron.config.parsing.flags import given_options
from megatron.extensions.retro.instruct_flags import InstructConfig
from megatron.extensions.retro.project_settings import RetroPlan, RetroProject, read_retro_project


@dataclass(frozen=True, kw_only=True)
class RetroConfig:
    """Retrieval (pretrain_retro.py): neighbors of each chunk of a sample."""

    retro_project_dir: str | None = setting(None, plan="objective.own.project_dir")
    """Directory with the database and the neighbors of Retro preprocessing. Data, split, seed,
    lengths and tokenizer come from its config.json, with and without --retro-add-retriever."""

    retro_add_retriever: bool = setting(False, plan="model.retro_layers")
    """Let some layers attend to retrieved neighbors. Without it pretrain_retro.py trains a GPT on the
    same samples."""

    retro_chunk_length: int = setting(64, at_least=1)
    """Tokens of a chunk, of samples and of the database; with --retro-project-dir the value in its
    config.json."""

    retro_num_neighbors: int = setting(2, at_least=1, in_weights=False)
    """Neighbors of each chunk that are retrieved."""

    retro_num_retrieved_chunks: int = setting(2, at_least=1, plan="model.retro_retrieved_length")
    """Chunks of each neighbor: itself and those that follow it in its document."""

    retro_encoder_layers: int = setting(2, at_least=1)
    """Layers of the encoder of neighbors."""

    retro_encoder_hidden_dropout: float = setting(0.1, at_least=0, below=1, in_weights=False)
    """Dropout of the residual stream of the encoder of neighbors."""

    retro_encoder_attention_dropout: float = setting(0.1, at_least=0, below=1, in_weights=False)
    """Dropout of attention weights in the encoder of neighbors."""

    retro_attention_gate: float = setting(1.0, in_weights=False)
    """Factor of the output of cross-attention to neighbors; 0 leaves a GPT."""

    retro_verify_neighbor_count: bool = setting(
        True, flag="--retro-no-verify-neighbor-count", plan="objective.own.verifies_count"
    )
    """Do not check that there are neighbors for all samples of the run. If there are fewer, samples
    repeat from the first on."""

    retro_normed_residual: bool = False
    """Add cross-attention of the encoder to its normalized input rather than to the residual stream, as
    Megatron core does."""

    retro_final_norm: bool = setting(True, flag="--retro-no-final-norm", plan="model.final_norm")
    """Leave out the final norm before the logits, as Megatron core does in Retro since 2024."""


def settings_of(values: Mapping[str, Any]) -> RetroProject | None:
    """Return the project of a command line, or of a checkpoint; None if there is none.

    Args:
        values: by field, those given over those saved.

    Raises:
        ConfigError: its config.json cannot be read.
    """
    directory = values.get("retro_project_dir")
    return read_retro_project(directory) if directory else None


def needs_complete_run(config: Config) -> bool:
    """Return whether there is a project: its neighbors belong to the samples of a complete run."""
    return bool(config.section(RetroConfig).retro_project_dir)


def retro_layer_numbers(num_layers: int) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the layers that attend to neighbors.

    Source: Megatron-LM: every third layer from the sixth on, or the ninth of more than 15.
    """
    return tuple(range(6 if num_layers <= 15 else 9, num_layers + 1, 3))


@dataclass(frozen=True, kw_only=True)
class RetroSpec:
    """Chunked cross-attention to retrieved neighbors, and their encoder."""

    retro_layers: tuple[int, ...] = ()  # numbers, from 1 on, of those with cross-attention
    retro_encoder_layers: int = 0
    retro_encoder_hidden_dropout: float = 0.0
    retro_encoder_attention_dropout: float = 0.0
    retro_chunk_length: int = 0  # tokens
    retro_num_neighbors: int = 0  # of a chunk
    retro_retrieved_length: int = 0  # tokens of a neighbor
    retro_attention_gate: float = 1.0  # factor of the output of cross-attention to neighbors
    retro_normed_residual: bool = False  # in the encoder's cross-attention; False: the stream
    final_norm: bool = True  # before the logits


def with_retriever(spec: ModelSpec, config: RetroConfig, model: ModelConfig) -> ModelSpec:
    """Return `spec`, a GPT's, with chunked cross-attention to neighbors."""
    retrieved = config.retro_chunk_length * config.retro_num_retrieved_chunks
    retro = resolve(
        RetroSpec,
        "model",
        config,
        retro_layers=retro_layer_numbers(model.num_layers),
        retro_retrieved_length=retrieved,
    )
    longest = model.max_position_embeddings or max(model.seq_length, retrieved)
    positions = replace(spec.positions, max_position_embeddings=longest)
    return replace(spec, positions=positions, own=retro)


def plan_retro(config: RetroConfig, *, seq_length: int) -> RetroPlan:
    """Return how neighbors of samples of `seq_length` tokens are read."""
    return RetroPlan(
        project_dir=config.retro_project_dir or "",
        chunk_length=config.retro_chunk_length,
        num_chunks=seq_length // config.retro_chunk_length,
        num_neighbors=config.retro_num_neighbors,
        num_retrieved_chunks=config.retro_num_retrieved_chunks,
        verifies_count=config.retro_verify_neighbor_count,
    )


def retro_problems(
    config: RetroConfig,
    model: ModelConfig,
    masks: MaskConfig,
    parallel: ParallelConfig,
    reason: str,
) -> Iterator[str]:
    """Yield why a network with retrieval cannot be built.

    Args:
        reason: end of the messages about flags that it does not have.
    """
    yield from range_problems(config)
    chunk, retrieved = config.retro_chunk_length, config.retro_num_retrieved_chunks
    positions = model.max_position_embeddings
    if positions is not None and positions < chunk * retrieved:
        yield (
            f"--max-position-embeddings {positions} is less than the {chunk * retrieved} tokens of a "
            "neighbor (--retro-chunk-length * --retro-num-retrieved-chunks)"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and tensor > 0 and chunk * retrieved % tensor:
        yield (
            f"--sequence-parallel divides the {chunk * retrieved} tokens of a neighbor "
            f"(--retro-chunk-length * --retro-num-retrieved-chunks) by --tensor-model-parallel-size "
            f"{tensor}, which leaves a remainder"
        )
    if not retro_layer_numbers(model.num_layers):
        yield (
            f"--num-layers {model.num_layers} must be at least 6: the first layer that attends to "
            "neighbors is the sixth"
        )
    flags = unbuilt_flags(model, masks, parallel, positions=("learned", "rotary", "none"))
    yield from flag_problems(flags, reason)


def neighbor_problems(config: RetroConfig, model: ModelConfig, *, order: str) -> Iterator[str]:
    """Yield why the samples are not those whose chunks have stored neighbors.

    Args:
        order: --dataloader-type.
    """
    chunk = config.retro_chunk_length
    if chunk > 0 and model.seq_length % chunk:
        yield f"--seq-length {model.seq_length} is not a multiple of --retro-chunk-length {chunk}"
    if order != "single":
        yield (
            f"--dataloader-type {order}: neighbors are stored in the order of the samples: leave the "
            "flag out"
        )


def retro_flag_problems(config: RetroConfig) -> Iterator[str]:
    """Yield the flags of retrieval, for a network without it."""
    # A GPT baseline is trained on the samples of a project too, whose chunks have this length.
    kept = replace(config, retro_project_dir=None)
    if config.retro_project_dir:
        kept = replace(kept, retro_chunk_length=RetroConfig.retro_chunk_length)
    for option in given_options(kept):
        needed = "" if option == "--retro-add-retriever" else " with --retro-add-retriever"
        yield f"{option} is for pretrain_retro.py{needed}: leave it out"


SECTIONS = {"retro": RetroConfig, "instruct": InstructConfig}
OF_NETWORK = ("retro",)
