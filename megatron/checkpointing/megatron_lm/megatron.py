"""Read Megatron-LM checkpoints of every version: `mp_rank_TT[_PPP]/model_optim_rng.pt`.

Parameter names of its legacy layers or of megatron.core. Distributed checkpoints are read by
torch_dist.py, which shares names and settings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.megatron_lm.arguments import values_of
from megatron.checkpointing.megatron_lm.distributed_files import StoredTensor, Weight
from megatron.checkpointing.megatron_lm.foreign_checkpoint import (
    ForeignCheckpoint,
    Rows,
    gate_half,
    known_version,
    latent_rows,
    latent_sizes,
    progress_of,
)
from megatron.checkpointing.megatron_lm.networks import Form, identify_network
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    ShardedTensor,
    wrap_full_tensor,
)
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.common.errors import CheckpointError
from megatron.config.parsing.files import Values

TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_FILE = "model_optim_rng.pt"

_RENAMED = (
    (r"^(decoder\.layers\.\d+)\.pre_mlp_layernorm\.", r"\1.post_inter_attention_layernorm."),
    (
        r"^(decoder\.layers\.\d+)\.mlp\.linear_fc1\.layer_norm_",
        r"\1.post_inter_attention_layernorm.",
    ),
    (r"\.pre_cross_attn_layernorm\.", ".post_attention_layernorm."),
    (r"\.cross_attention\.linear_q\.", ".inter_attention.query."),
    (r"\.cross_attention\.linear_kv\.", ".inter_attention.key_value."),
    (r"\.cross_attention\.linear_proj\.", ".inter_attention.dense."),
    (r"^lm_head\.layer_norm\.", "lm_head.layernorm."),
    (r"^(lm_head\.)?output_layer\.bias$", "lm_head.bias"),
    (r"^(word|position|tokentype)_embeddings\.", r"embedding.\1_embeddings."),
    (r"\.attention\.", ".self_attention."),
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".post_attention_layernorm."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    (r"\.self_attention\.linear_qkv\.", ".self_attention.query_key_value."),
    (r"\.self_attention\.linear_proj\.", ".self_attention.dense."),
    (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_", r".self_attention.\1_layernorm."),
    (r"\.self_attention\.linear_(q|kv)_(down|up)_proj\.", r".self_attention.\1_\2."),
    (r"\.self_attention\.linear_q_proj\.", ".self_attention.query."),
    (r"\.self_attention\.core_attention\.softmax_offset$", ".self_attention.sinks"),
    (r"\.mlp\.experts\.experts\.", ".mlp.experts."),
    (r"\.mlp\.shared_experts\.gate_weight$", ".mlp.shared_expert_gate.weight"),
    (r"\.mlp\.(shared_experts\.|experts\.|)linear_fc1\.", r".mlp.\1dense_h_to_4h."),
    (r"\.mlp\.(shared_experts\.|experts\.|)linear_fc2\.", r".mlp.\1dense_4h_to_h."),
    (r"^(decoder\.)?final_norm\.", r"\1final_layernorm."),
)
"""Parameter names of older versions and of megatron.core -> names of version 3."""
_LAYER = re.compile(r"(decoder\.|)layers\.(\d+)\.(.*)")
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.")
_NO_WEIGHT = ("inv_freq", "_extra_state", "masked_bias", "position_ids")
_COPIES = ("word_embeddings_for_head", "output_layer")
"""The last stage's copy of tied embeddings."""


def checkpoint_in(path: Path) -> Path:
    """Return the folder named by the tracker in `path`, or `path` if it has folders of ranks itself.

    A file belongs to the only rank, and is returned.

    Raises:
        CheckpointError: there is no such folder.
    """
    if path.is_file() or any(_RANK.fullmatch(folder.name) for folder in path.glob("mp_rank_*")):
        return path
    return tracked_folder(path, instead="folder mp_rank_00")


def tracked_folder(path: Path, *, instead: str) -> Path:
    """Return the folder named by the tracker in `path`.

    Args:
        instead: expected content of a folder of one checkpoint, for the message.

    Raises:
        CheckpointError: there is no such folder.
    """
    try:
        name = (path / TRACKER).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CheckpointError(f"{path} has no {TRACKER} and no {instead}") from error
    if name != "release" and not name.isdecimal():
        raise CheckpointError(
            f"{path / TRACKER} contains {name[:40]!r}, neither an iteration nor release"
        )
    return path / (name if name == "release" else f"iter_{int(name):07d}")


def find(path: Path, *, heads: int | None = None) -> ForeignCheckpoint:
    """Read the checkpoint in `path`; tensors are read on access.

    Args:
        heads: attention heads, for files without arguments.

    Raises:
        CheckpointError: it is of no network that has a form in these files.
    """
    folder = checkpoint_in(path)
    stages = [[read_foreign(file) for file in ranks] for ranks in _files(folder)]
    found = found_in(folder, stages, heads=heads)
    if "optimizer" not in stages[0][0]:
        return found
    return replace(found, notices=["optimizer states are not read: only weights are loaded"])


def found_in(
    folder: Path,
    stages: Sequence[Sequence[Mapping[str, Any]]],
    *,
    heads: int | None,
    holds_experts: bool = False,
    steps: float | None = None,
) -> ForeignCheckpoint:
    """Return the checkpoint of all stages and ranks, whose files are read.

    Args:
        heads: attention heads, for files without arguments.
        holds_experts: whether experts of a layer are one tensor in these files, and are read.
        steps: that the optimizer has taken, if tensors have its states; None if they have none.

    Raises:
        CheckpointError: it is of no network that has a form in these files.
    """
    first = stages[0][0]
    arguments = first.get("args")
    saved_args = vars(arguments) if arguments is not None else {}
    version = known_version(float(first.get("checkpoint_version", 0)), folder)
    try:
        form, names, modules = _network_of(stages, saved_args)
        shards = {
            names.parameter(module): own
            for module, own in modules.items()
            if not (is_tied(saved_args) and module.startswith(_COPIES))
        }
    except (KeyError, AttributeError, TypeError, StopIteration) as error:
        raise CheckpointError(f"{folder}: not as Megatron-LM lays it out: {error!r}") from error
    table = next(s for name, s in shards.items() if name.endswith("word_embeddings.weight"))
    heads = saved_args.get("num_attention_heads") or heads
    if not heads:
        raise CheckpointError(f"{folder} holds no arguments: give --num-attention-heads")
    rows = Rows(
        version=version,
        head_dim=saved_args.get("kv_channels") or int(table[0].shape[1]) // heads,
        gate=gate_half(saved_args),
        latent=latent_rows(saved_args, heads=heads),
        latent_sizes=latent_sizes(saved_args),
    )
    progress = progress_of(first, saved_args, is_release=folder.name == "release")
    own = values_of(arguments, holds_experts=holds_experts)
    own = own or _values_of_shapes(modules, names.num_layers, heads)
    return ForeignCheckpoint(
        folder=folder,
        values={**own, **form.values(modules, names.num_decoder_layers, saved_args)},
        rows=sum(len(shard) for shard in table),
        vocab_size=_vocab_size(first),
        checkpoint=FullCheckpoint(
            parameters=LazyParameters(
                {n: partial(_load_parameter, rows, steps, n, s) for n, s in shards.items()}
            ),
            counters=_counters(progress) if steps is not None else {},
        ),
        state=progress,
        has_optimizer=steps is not None,
        objective=names.architecture,
    )


def _network_of(
    stages: Sequence[Sequence[Mapping[str, Any]]], saved_args: Mapping[str, Any]
) -> tuple[Form, ParameterNames, dict[str, list[Weight]]]:
    """Return the form of a network's files, its names, and the shards of its modules."""
    parts = [[_parts(rank) for rank in ranks] for ranks in stages]
    architecture, form = identify_network({n for ranks in parts for part in ranks[0] for n in part})
    modules, layers = _modules(
        [[[_rename(part, form) for part in rank] for rank in ranks] for ranks in parts]
    )
    predictions = {match[1] for module in modules if (match := _PREDICTION.match(module))}
    names = ParameterNames(
        architecture=architecture,
        num_layers=layers[""],
        num_decoder_layers=layers["decoder."],
        num_predictions=len(predictions),
        tied=is_tied(saved_args) or bool(predictions),
    )
    return form, names, modules


def is_tied(saved_args: Mapping[str, Any]) -> bool:
    """Whether the head has the table of the embedding, by the arguments in the files."""
    return not saved_args.get("untie_embeddings_and_output_weights")


def _counters(progress: Mapping[str, int]) -> dict[str, int]:
    """Return DeepSpeed's counters."""
    steps, samples = progress["iteration"], progress["samples"]
    return {"global_steps": steps, "global_samples": samples, "skipped_steps": 0}


def tensor_ranks(path: Path) -> int:
    """Return the tensor-parallel size of the checkpoint in `path`."""
    return len(_files(checkpoint_in(path))[0])


def _files(folder: Path) -> list[list[Path]]:
    """List the files of every stage in the order of tensor-parallel ranks."""
    if folder.is_file():
        return [[folder]]
    files = {}
    for own in folder.glob("mp_rank_*"):
        match = _RANK.fullmatch(own.name)
        if not match:
            raise CheckpointError(f"{own}: files of single experts are not supported")
        files[int(match[2] or 0), int(match[1])] = own / _FILE
    stages, ranks = (1 + max((key[axis] for key in files), default=-1) for axis in (0, 1))
    missing = [
        f"mp_rank_{rank:02d}, stage {stage}"
        for stage in range(stages)
        for rank in range(ranks)
        if (stage, rank) not in files or not files[stage, rank].is_file()
    ]
    if missing or not files:
        raise CheckpointError(f"{folder} lacks {_FILE} of {', '.join(missing) or 'all ranks'}")
    return [[files[stage, rank] for rank in range(ranks)] for stage in range(stages)]


def _parts(rank: Mapping[str, Any]) -> list[dict[str, Weight]]:
    """Return the parameters of a rank, one dictionary per virtual pipeline stage."""
    if "model" in rank:
        return [_flat(rank["model"])]
    names = sorted((n for n in rank if re.fullmatch(r"model\d+", n)), key=lambda n: int(n[5:]))
    return [_flat(rank[name]) for name in names]


def _flat(tree: Mapping[str, Any]) -> dict[str, Weight]:
    return {
        re.sub(r"^(language_model|module)\.", "", name): tensor
        for name, tensor in _leaves(tree, "")
        if not name.endswith(_NO_WEIGHT)
    }


def _rename(part: Mapping[str, Weight], form: Form) -> dict[str, Weight]:
    """Return the parameters by the names of version 3; the only stack's have no prefix."""
    found = {}
    for name, tensor in part.items():
        for pattern, other in (*form.renamed, *_RENAMED):
            name = re.sub(pattern, other, name)
        found[name] = tensor
    return found


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Weight]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, Weight):
            yield f"{prefix}{key}", value


def _modules(
    stages: Sequence[Sequence[Sequence[Mapping[str, Weight]]]],
) -> tuple[dict[str, list[Weight]], dict[str, int]]:
    """Return the shards of each module's parameter, and the number of layers of each stack.

    Stacks are "" and, after an encoder, "decoder.". `stages` is [stage][rank][virtual stage].
    """
    modules: dict[str, list[Weight]] = {}
    layers = {"": 0, "decoder.": 0}
    for part in range(len(stages[0][0])):
        for ranks in stages:
            own = [rank[part] for rank in ranks]
            inside: dict[str, set[int]] = {"": set(), "decoder.": set()}
            for name in own[0]:
                if match := _LAYER.fullmatch(name):
                    inside[match[1]].add(int(match[2]))
            for name in own[0]:
                shards = [shard[name] for shard in own]
                if match := _LAYER.fullmatch(name):
                    number = layers[match[1]] + int(match[2]) - min(inside[match[1]])
                    name = f"{match[1]}layers.{number}.{match[3]}"
                modules[name] = shards
            for stack, numbers in inside.items():
                layers[stack] += len(numbers)
    return modules, layers


def _load_parameter(
    rows: Rows, steps: float | None, name: str, shards: Sequence[Weight]
) -> ParameterState:
    def joined(shards: Sequence[Weight]) -> ShardedTensor:
        tensors = [shard.load() if isinstance(shard, StoredTensor) else shard for shard in shards]
        return wrap_full_tensor(rows.join(name, tensors))

    # Distributed files hold states, and a parameter is one shard there.
    (first, *_) = shards
    stored = first.states if isinstance(first, StoredTensor) else {}
    try:
        states = {state: joined([tensor]) for state, tensor in stored.items()}
        weight = states.pop("fp32") if "fp32" in states else joined(shards)
        return ParameterState(weight=weight, states=states, steps=steps if states else None)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{name}: its shards do not fit together: {error}") from error


def _vocab_size(first: Mapping[str, Any]) -> int | None:
    name = (first.get("checkpoint_info") or {}).get("original_vocab_size")
    return int(name) if name else None


def _values_of_shapes(modules: Mapping[str, Sequence[Weight]], layers: int, heads: int) -> Values:
    """Derive settings from shapes for files without arguments, such as GPT-2 345M's."""
    table = modules["embedding.word_embeddings.weight"][0]
    positions = modules["embedding.position_embeddings.weight"][0].shape[0]
    return {
        **{"num_layers": layers, "hidden_size": table.shape[1], "num_attention_heads": heads},
        **{"seq_length": positions, "max_position_embeddings": positions},
        "position_embedding_type": "learned_absolute",
        "bf16": table.dtype == torch.bfloat16,
        "fp16": table.dtype not in (torch.bfloat16, torch.float32),
    }
