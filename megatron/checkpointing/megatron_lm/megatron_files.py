"""Write Megatron-LM checkpoints: weights only, sharded for any tensor and pipeline parallel size."""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.conversion.network import parameters_of
from megatron.checkpointing.expressed import Allowed, not_expressed, plain_values
from megatron.checkpointing.manifest import STAGING, Manifest
from megatron.checkpointing.megatron_lm.arguments import (
    EXPRESSED_OF_EXPERTS,
    OF_NETWORK,
    expert_arguments,
)
from megatron.checkpointing.megatron_lm.distributed_writer import Written, write_distributed
from megatron.checkpointing.megatron_lm.foreign_checkpoint import gate_half
from megatron.checkpointing.megatron_lm.networks import (
    Form,
    first_decoder_stage,
    form_of,
    num_decoder_layers,
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
from megatron.common.registry import NETWORKS
from megatron.config.data.tokenizer import padded_vocab_size
from megatron.config.flag_names import flag_setting
from megatron.config.network.experts import MoESpec
from megatron.config.network.model import ModelConfig, VocabularySpec
from megatron.config.network.model_problems import query_group_problems
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.parsing.declaration import Flag
from megatron.tensor_parallel.dtypes import TORCH_DTYPES

_BY_ARGUMENT = (
    *(name.removeprefix("model.") for flag in OF_NETWORK for name in flag.decisions),
    *("num_query_groups", "window", "linear_bias"),
)
"""Fields that arguments express."""
_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "squared_relu", "swiglu", "geglu", "liglu", "reglu")
_TOKENIZER_FLAGS = (
    *("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path"),
    "make_vocab_size_divisible_by",
)
"""Arguments with the same name as a flag of the tokenizer."""
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
    form = _form_of(spec)
    raise_if_any(_problems(spec, tensor, pipeline, flags, distributed=distributed))
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
        "args": _arguments(manifest, rows, tensor, pipeline, for_release=for_release),
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
    names, form = ParameterNames.of(spec), _form_of(spec)

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


def _problems(
    spec: ModelSpec,
    tensor: int,
    pipeline: int,
    flags: tuple[str, str],
    *,
    distributed: bool = False,
) -> Iterator[str]:
    yield from _form_of(spec).problems(spec, pipeline=pipeline, flag=flags[1])
    if spec.moe and (problems := [*_expert_problems(spec, distributed=distributed)]):
        spec = replace(spec, moe=None)
        yield from problems
    if spec.lora and spec.lora.lora_rank:
        spec = replace(spec, lora=None)
        yield "Megatron-LM's files cannot express adapters (--lora-rank): merge them into the weights"
    for field, value, _ in not_expressed(spec, _expressed(spec, distributed=distributed)):
        yield f"Megatron-LM's files cannot express {field} {value} ({flag_setting(field)})"
    decoder_layers = num_decoder_layers(spec)
    if decoder_layers and pipeline > 1 and not first_decoder_stage(spec, pipeline):
        yield (
            f"{flags[1]} {pipeline} cannot be divided between the {spec.num_layers} layers of "
            f"the encoder and the {decoder_layers} of the decoder"
        )
    for flag, parts, sizes in (
        (flags[1], pipeline, () if decoder_layers else ("num_layers",)),
        (flags[0], tensor, ("num_attention_heads", "ffn_hidden_size")),
    ):
        if parts < 1:
            yield f"{flag} {parts} must be at least 1"
            continue
        for size in sizes:
            if (value := flat(spec)[size]) % parts:
                yield f"{flag} {parts} does not divide {size} {value}"
    if tensor > 0:
        # Ranks that share a query group have parts of its projection, as here.
        attention = spec.attention
        yield from query_group_problems(
            attention.num_query_groups, attention.head_dim, tensor, flag=flags[0]
        )


def _expert_problems(spec: ModelSpec, *, distributed: bool) -> Iterator[str]:
    counts = {*spec.part(MoESpec).num_experts} - {1}
    if not counts:
        return
    if not _form_of(spec).has_experts:
        yield f"Megatron-LM has no {spec.architecture} with experts (--num-experts)"
    elif not distributed:
        yield (
            "Megatron-LM's files of ranks cannot express layers with experts (--num-experts): "
            "write --ckpt-format torch_dist"
        )
    elif len(counts) > 1:
        yield f"Megatron-LM's layers have the same number of experts, not {sorted(counts)} (--num-experts)"


def _expressed(spec: ModelSpec, *, distributed: bool = False) -> Allowed:
    """Return the values of fields that the arguments or weights of these files express."""
    of_experts = EXPRESSED_OF_EXPERTS if distributed else ()
    return {
        **plain_values(spec),
        **dict.fromkeys((*_BY_ARGUMENT, *of_experts)),
        "architecture": None,
        "position_embedding": ("learned", "rotary", "alibi", "none"),
        "normalization": ("LayerNorm", "RMSNorm"),
        "activation": _ACTIVATIONS,
        "softmax_type": ("vanilla", "off-by-one"),
        "attention_output_bias": None,
        "attention_bias_apart": (False,),
        **dict.fromkeys(_form_of(spec).expresses),
    }


def _keys(name: str, spec: ModelSpec, stage: int, pipeline: int) -> Iterator[tuple[str, ...]]:
    """Yield the key paths of a parameter in a stage's state dict: none, one or two."""
    module = ParameterNames.of(spec).module(name)
    if flat_name := _form_of(spec).flat_name(module):
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
    gate = gate_half(_activation_arguments(manifest.spec))
    if is_buffer(name):
        return weight.clone()
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


def _arguments(
    manifest: Manifest, rows: int, tensor: int, pipeline: int, *, for_release: bool
) -> Namespace:
    """Build the argument namespace that Megatron-LM compares and reads weights by."""
    spec, state, tokenizer = manifest.spec, manifest.state, manifest.tokenizer
    attention, dtype = spec.attention, manifest.precision.dtype
    position = spec.positions.position_embedding
    positions = {"learned": "learned_absolute", "rotary": "rope"}
    decided = flat(spec)
    network = {flag.name: _argument(flag, manifest.network_flags, decided) for flag in OF_NETWORK}
    return Namespace(
        **network
        | {
            "embed_layernorm": decided["embed_layernorm"],  # another flag may imply it
            "kv_channels": attention.head_dim,
            **_activation_arguments(spec),
        },
        **{name: getattr(tokenizer, name) for name in _TOKENIZER_FLAGS},
        tokenizer_sentencepiece_legacy=tokenizer.tokenizer_sentencepiece_legacy,
        num_query_groups=attention.num_query_groups,
        group_query_attention=attention.num_query_groups != attention.num_attention_heads,
        padded_vocab_size=rows,
        position_embedding_type=positions.get(position, position),
        layernorm_epsilon=spec.norm.norm_epsilon,
        window_attn_skip_freq=_windows(spec),
        add_bias_linear=spec.mlp.linear_bias,
        **_form_of(spec).arguments(spec, pipeline),
        **(expert_arguments(spec.moe, manifest.expert_flags) if spec.moe else {}),
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        fp16=dtype == "fp16",
        bf16=dtype == "bf16",
        params_dtype=TORCH_DTYPES[dtype],
        consumed_train_samples=0 if for_release else state.samples,
        consumed_valid_samples=0 if for_release else state.valid_samples,
    )


def _activation_arguments(spec: ModelSpec) -> dict[str, Any]:
    activation = spec.mlp.activation
    return {
        "swiglu": activation == "swiglu",
        "squared_relu": activation == "squared_relu",
        "glu_activation": activation if activation in ("geglu", "liglu", "reglu") else None,
        "bias_gelu_fusion": activation == "gelu_tanh",
    }


def _argument(flag: Flag, given: ModelConfig, decided: Mapping[str, Any]) -> Any:
    """Return the value of a flag as it was given, or as resolved without it."""
    value = getattr(given, flag.name)
    return decided.get(flag.name) if value is None else value


def _form_of(spec: ModelSpec) -> Form:
    """Return the form of a network in these files.

    Raises:
        CheckpointError: they cannot hold it.
    """
    name = spec.architecture
    if name in NETWORKS and (form := form_of(name)):
        return form
    raise CheckpointError(f"Megatron-LM has no {name}: its files cannot hold this network")


def _windows(spec: ModelSpec) -> list[int] | None:
    """Return 1 for each layer with sliding window, 0 for the rest; None if all are alike."""
    full = spec.attention.full_attention_layers
    return [int(n not in full) for n in range(1, spec.num_layers + 1)] if full else None
