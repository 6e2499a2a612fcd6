"""Write Megatron-LM checkpoints: weights only, sharded for any tensor and pipeline parallel size."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.conversion.network import parameters_of
from megatron.checkpointing.manifest import STAGING, Manifest
from megatron.checkpointing.megatron_lm.distributed_writer import Written, write_distributed
from megatron.checkpointing.megatron_lm.foreign_checkpoint import (
    Latent,
    gate_half,
    latent_rows,
    turned_rows,
)
from megatron.checkpointing.megatron_lm.networks import (
    first_decoder_stage,
    num_decoder_layers,
)
from megatron.checkpointing.megatron_lm.written_arguments import (
    activation_arguments,
    writing_problems,
    written_arguments,
    written_form,
)
from megatron.checkpointing.parameter_names import (
    ParameterNames,
    is_buffer,
    is_of_experts,
    is_of_vocabulary,
)
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint, ParameterState
from megatron.checkpointing.writer import write_state
from megatron.common.atomic_files import replace_text, staged_folder
from megatron.common.errors import CheckpointError, ConfigError, raise_if_any, reason
from megatron.common.progress import with_progress
from megatron.config.data.tokenizer import padded_vocab_size
from megatron.config.network.model import VocabularySpec
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.tensor_parallel.dtypes import TORCH_DTYPES

_PATHS: dict[str, tuple[tuple[str, ...], int]] = {
    "embedding": (("language_model",), 2),
    "layers": (("language_model", "encoder"), 0),
    "final_layernorm": (("language_model", "encoder"), 0),
    "decoder": (("language_model",), 1),
    "output_layer": (("language_model",), 1),
    "pooler": (("language_model",), 1),
    "lm_head": ((), 1),
    "binary_head": ((), 1),
}
"""Key path of each part's parameters in a state dict: the dictionaries that hold them, and how many
levels its module name is split into."""
_LAYER = re.compile(r"(decoder\.|)layers\.(\d+)\.(.*)")
_EXPERTS_DOWN = ".experts.dense_4h_to_h.weight"
"""End of the name of a weight of experts whose columns are rows here."""
_TRACKER = "latest_checkpointed_iteration.txt"


def write_megatron(
    manifest: Manifest,
    checkpoint: FullCheckpoint,
    output: Path,
    *,
    tensor: int,
    pipeline: int,
    flags: tuple[str, str],
    for_release: bool,
    distributed: bool = False,
) -> Path:
    """Write the weights of a checkpoint for `tensor` * `pipeline` ranks; return the folder.

    Memory: one rank's weights; of distributed files one parameter.

    Args:
        flags: names of the flags for `tensor` and `pipeline`, for messages.
        for_release: whether to leave out the consumed samples.
        distributed: whether to write the format torch_dist, for any ranks.

    Raises:
        ConfigError: the network cannot be sharded this way, or Megatron-LM cannot express it.
        CheckpointError: `output` has a checkpoint of this iteration, or cannot be written to.

    Source: Megatron-LM's checkpoints of version 3.0.
    """
    spec = manifest.spec
    form = written_form(spec)
    raise_if_any(writing_problems(spec, tensor, pipeline, flags, distributed=distributed))
    if distributed and not form.distributed:
        raise ConfigError(
            f"a {spec.architecture} is not written in the format torch_dist: write --ckpt-format torch"
        )
    rows = _rows(manifest, tensor, flag=flags[0])
    iteration = manifest.state.iteration
    folder = output / f"iter_{iteration:07d}"
    if folder.exists():
        raise CheckpointError(f"{folder} exists: move it away, or write to another directory")
    common = {
        "args": written_arguments(manifest, rows, tensor, pipeline, for_release=for_release),
        "checkpoint_version": 3.0,
        "checkpoint_info": _vocab_info(spec, rows),
        "iteration": iteration,
        "tokens": 0 if for_release else manifest.state.tokens,
    }
    try:
        with staged_folder(output / f"{STAGING}{folder.name}", folder) as staging:
            if distributed:
                write_distributed(staging, common, _full_tensors(manifest, checkpoint, rows))
            ranks = [*product(range(pipeline), range(0 if distributed else tensor))]
            for stage, rank in with_progress(ranks, f"writing of {folder}", len(ranks), "files"):
                suffix = f"_{stage:03d}" if pipeline > 1 else ""
                file = staging / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt"
                parts = _shards(manifest, checkpoint, (stage, rank), (pipeline, tensor), rows)
                _write({**common, "model": _nest(dict(parts))}, file)
        # Last: it marks the files as complete.
        replace_text(output / _TRACKER, str(iteration), has_one_writer=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: {reason(error, folder)}") from error
    return folder


def _rows(manifest: Manifest, tensor: int, *, flag: str) -> int:
    """Return the rows of the token embedding, padded for `tensor` ranks.

    Raises:
        ConfigError: they cannot be divided among these.
    """
    tokenizer = manifest.tokenizer
    rows = padded_vocab_size(
        manifest.spec.vocabulary.vocab_size,
        divisible_by=tokenizer.make_vocab_size_divisible_by,
        tensor=tensor,
        pad_to=tokenizer.pad_vocab_size_to,
    )
    if rows % tensor:
        raise ConfigError(f"{flag} {tensor} does not divide the {rows} rows of the token embedding")
    return rows


def _vocab_info(spec: ModelSpec, rows: int) -> dict[str, int]:
    return {"padded_vocab_size": rows, "original_vocab_size": spec.vocabulary.vocab_size}


def _write(content: Mapping[str, Any], file: Path) -> None:
    try:
        file.parent.mkdir(parents=True)
        write_state(content, file)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{file.parent}: {reason(error, file.parent)}") from error


def _full_tensors(manifest: Manifest, checkpoint: FullCheckpoint, rows: int) -> Iterator[Written]:
    """Yield the parameters by megatron.core's names, to be loaded one by one."""
    spec, dtype = manifest.spec, TORCH_DTYPES[manifest.precision.dtype]
    names, form = ParameterNames.of(spec), written_form(spec)

    def load(name: str) -> Tensor:
        return _shard(name, checkpoint.parameters[name], manifest, rows, 0, 1)

    for name, parameter in parameters_of(spec).items():
        shape = tuple(parameter.shape)
        if is_of_vocabulary(name):
            shape = (rows, *shape[1:])
        elif name.endswith(_EXPERTS_DOWN):
            shape = (shape[0], *shape[:0:-1])
        for module in form.distributed_names(names.module(name), spec):
            yield Written(
                name=module,
                shape=shape,
                dtype=parameter.dtype if is_buffer(name) else dtype,
                load=partial(load, name),
            )


def _shards(
    manifest: Manifest,
    checkpoint: FullCheckpoint,
    coordinates: tuple[int, int],
    sizes: tuple[int, int],
    rows: int,
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors in the state dict of one rank with their key paths.

    Args:
        coordinates: pipeline stage and tensor-parallel rank.
        sizes: pipeline and tensor-parallel size.
        rows: of the token embedding.
    """
    (stage, rank), (pipeline, tensor) = coordinates, sizes
    for name in checkpoint.parameters:
        # Loaded only where needed: each access may read and join the parameter again.
        if own := list(_keys(name, manifest.spec, stage, pipeline)):
            shard = _shard(name, checkpoint.parameters[name], manifest, rows, rank, tensor)
            yield from dict.fromkeys(own, shard).items()


def _keys(name: str, spec: ModelSpec, stage: int, pipeline: int) -> Iterator[tuple[str, ...]]:
    """Yield the key paths of a parameter in a stage's state dict: none, one or two."""
    module = ParameterNames.of(spec).module(name)
    if flat_name := written_form(spec).flat_name(module):
        yield (flat_name,)
        return
    part = module.partition(".")[0]
    if part not in _PATHS:
        raise CheckpointError(f"Megatron-LM's files cannot express the parameter {name}")
    parents, levels = _PATHS[part]
    first = first_decoder_stage(spec, pipeline)
    encoder_stages = first or pipeline
    own = {pipeline - 1}
    if part == "embedding":
        own = {0, first}
    elif part == "final_layernorm":
        own = {encoder_stages - 1}
    elif match := _LAYER.fullmatch(module):
        stack, number, rest = match[1], int(match[2]), match[3]
        layers, stages = spec.num_layers, encoder_stages
        if stack:
            layers, stages = num_decoder_layers(spec), pipeline - first
        index, local = divmod(number, layers // stages)
        own = {index + first if stack else index}
        module = f"{stack}layers.{local}.{rest}"
    if stage in own:
        yield (*parents, *module.split(".", levels))
    is_tied_table = spec.vocabulary.tied_embeddings and module == "embedding.word_embeddings.weight"
    if is_tied_table and stage == pipeline - 1 > 0:
        yield "word_embeddings_for_head", "weight"


def _shard(
    name: str, parameter: ParameterState, manifest: Manifest, rows: int, rank: int, tensor: int
) -> Tensor:
    weight = parameter.weight.all()
    if is_of_vocabulary(name):
        weight = _pad_rows(weight, manifest.spec.vocabulary, rows)
    gate = gate_half(activation_arguments(manifest.spec))
    if is_buffer(name):
        return weight.clone()
    if turned := turned_rows(name, _latent(manifest.spec)):
        (weight,) = turned.to_hugging_face(weight)
    if name.endswith(_EXPERTS_DOWN):
        weight = weight.transpose(1, 2)
    elif gate is not None and ".dense_h_to_4h." in name:
        # Our rows alternate gate and up. Experts are written for one rank alone.
        rows_dim = int(is_of_experts(name))
        halves = (
            weight.chunk(tensor, rows_dim)[rank].unflatten(rows_dim, (-1, 2)).unbind(rows_dim + 1)
        )
        weight = torch.cat((halves[gate], halves[1 - gate]), rows_dim)
    elif (dim := manifest.partition_dims.get(name)) is not None:
        weight = weight.chunk(tensor, dim)[rank]
    dtype = TORCH_DTYPES[manifest.precision.dtype]
    return weight.to(dtype).clone(memory_format=torch.contiguous_format)


def _pad_rows(table: Tensor, own: VocabularySpec, rows: int) -> Tensor:
    """Pad the token embedding, or the bias of logits, to `rows` rows with copies of the last one, as Megatron-LM's converter.

    Padding that took no part in the softmax is replaced, because in Megatron-LM it does, and zeros
    would be large logits.
    """
    kept = table if own.padded_vocab_in_softmax else table[: own.vocab_size]
    return torch.cat([kept, kept[-1:].expand(max(0, rows - len(kept)), *kept.shape[1:])])[:rows]


def _nest(shards: Mapping[tuple[str, ...], Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*parents, last), weight in shards.items():
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = weight
    return tree


def _latent(spec: ModelSpec) -> Latent:
    """Return the order of rows in latent attention."""
    given = {"multi_latent_attention": spec.latent is not None, **flat(spec)}
    return latent_rows(given, heads=spec.attention.num_attention_heads)
