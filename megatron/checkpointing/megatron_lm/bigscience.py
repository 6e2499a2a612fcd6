"""Read checkpoints of BigScience's and Microsoft's Megatron-DeepSpeed: files per layer and TP rank.

The two number layers differently, so layers are recognized by their contents.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.manifest import LATEST
from megatron.checkpointing.megatron_lm.arguments import values_of
from megatron.checkpointing.megatron_lm.foreign_checkpoint import (
    ForeignCheckpoint,
    Rows,
    gate_half,
    known_version,
    progress_of,
)
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.sharded_tensor import (
    FlatShard,
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    wrap_full_tensor,
)
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.common.errors import CheckpointError
from megatron.config.architecture.architecture import FIRST_LAYER

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_MAIN = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OUTPUT_LAYERS = ("lm_head.", "word_embeddings.")
_STATES = ("exp_avg", "exp_avg_sq")


def checkpoint_in(path: Path) -> Path:
    """Return the folder that `latest` in `path` names, or `path` if it has layer files itself."""
    hint = path / LATEST
    if any(path.glob("layer_*-model_*-model_states.pt")) or not hint.is_file():
        return path
    return path / hint.read_text(encoding="utf-8").strip()


def find(path: Path) -> ForeignCheckpoint:
    """Read the checkpoint in `path`; tensors are read on access.

    Raises:
        CheckpointError: it does not have the layout of these programs.
    """
    folder = checkpoint_in(path)
    layers, mains = _layer_files(folder), _main_files(folder)
    main = read_foreign(mains[0]) if mains else {}
    arguments = main.get("args")
    if arguments is None:
        raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt with arguments")
    saved_args = vars(arguments)
    try:
        files = _Layers(layers, untied=bool(saved_args.get("untie_embeddings_and_output_weights")))
        _require_one_order(saved_args, files, folder)
        rows = Rows(
            version=known_version(float(main.get("checkpoint_version", 3)), folder),
            head_dim=saved_args.get("kv_channels")
            or saved_args["hidden_size"] // saved_args["num_attention_heads"],
            gate=gate_half(saved_args),
        )
        trained = _optimizer(folder, mains, files) if mains else {}
    except (KeyError, AttributeError, TypeError, ValueError, StopIteration) as error:
        raise CheckpointError(f"{folder}: not as BigScience lays it out: {error!r}") from error
    complete = bool(trained) and set(trained) == set(files.names)
    makers = {
        name: partial(_parameter_state, rows, name, trained[name])
        if complete
        else partial(_weight, rows, name, files)
        for name in files.names
    }
    info = main.get("checkpoint_info") or {}
    return ForeignCheckpoint(
        folder=folder,
        values=values_of(arguments),
        rows=sum(len(shard) for shard in files.shards(files.table)),
        vocab_size=info.get("original_vocab_size"),
        checkpoint=FullCheckpoint(
            parameters=LazyParameters(makers),
            counters={
                name: int(main.get(name, 0))
                for name in ("global_steps", "global_samples", "skipped_steps")
            },
        ),
        state={
            **progress_of(main, saved_args),
            "skipped": int(main.get("skipped_steps", 0)),
        },
        has_optimizer=complete,
        notices=[] if complete else ["no optimizer states found: only weights are loaded"],
    )


class _Layers:
    """Map of our parameters to layer files.

    Args:
        files: by layer number, of every tensor-parallel rank.
        untied: whether the output layer has a separate weight.
    """

    def __init__(self, files: Mapping[int, Sequence[Path]], *, untied: bool):
        self._files = files
        self._tied = not untied
        self._modules: dict[int, str] = {}
        self._where: dict[str, tuple[int, str]] = {}
        self._num_layers = 0
        for number in sorted(files):
            keys = [key for key in self._read(number)[0] if not key.endswith("inv_freq")]
            if "word_embeddings.weight" in keys and not self._num_layers:
                self._modules[number] = "embedding"
            elif "input_layernorm.weight" in keys:
                self._modules[number] = f"layers.{self._num_layers}"
                self._num_layers += 1
            elif keys and not untied and any("word_embeddings" in key for key in keys):
                continue  # the last stage's copy of the embedding
            else:
                is_output = keys[0].startswith(_OUTPUT_LAYERS)
                self._modules[number] = "output_layer" if is_output else "final_layernorm"
            self._where |= {self._own_name(number, key): (number, key) for key in keys}
        self.names = list(self._where)
        self.table = next(name for name in self.names if name.endswith("word_embeddings.weight"))
        self.first_block = next(n for n, module in self._modules.items() if module == "layers.0")

    def _read(self, number: int) -> list[Mapping[str, Tensor]]:
        return [read_foreign(file) for file in self._files[number]]

    def shards(self, name: str) -> list[Tensor]:
        """Return the shards of our parameter `name`."""
        number, key = self._where[name]
        return [rank[key] for rank in self._read(number)]

    def own_name(self, name: str) -> str:
        """Translate a parameter name of their module to ours."""
        number, _, rest = name.partition(".")
        return self._own_name(int(number), rest) if number.isdigit() else name

    def _own_name(self, number: int, key: str) -> str:
        module = self._modules[number]
        if module == "output_layer":
            _, _, key = key.partition(".")
        names = ParameterNames(num_layers=self._num_layers, tied=self._tied)
        return names.parameter(f"{module}.{key}")

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return len(next(iter(self._files.values())))


def _weight(rows: Rows, name: str, files: _Layers) -> ParameterState:
    try:
        return ParameterState(weight=wrap_full_tensor(rows.join(name, files.shards(name))))
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name}: its shards do not fit together: {error}") from error


@dataclass(frozen=True)
class _Fragment:
    """A shard of a parameter in the flat tensors that ZeRO partitions over replicas."""

    shape: tuple[int, ...]
    start: int
    flat: Mapping[str, FlatShard]
    steps: float

    def tensor(self, state: str) -> Tensor:
        """Return the shard of the weight ("fp32") or of an optimizer state."""
        found = self.flat[state].flat(self.start, self.start + math.prod(self.shape))
        return found.view(self.shape)


def _parameter_state(rows: Rows, name: str, fragments: Sequence[_Fragment]) -> ParameterState:
    """Return a parameter with its fp32 weight and optimizer states."""

    def joined(state: str) -> Tensor:
        return rows.join(name, [fragment.tensor(state) for fragment in fragments])

    try:
        return ParameterState(
            weight=wrap_full_tensor(joined("fp32")),
            states={state: wrap_full_tensor(joined(state)) for state in _STATES},
            steps=fragments[0].steps,
        )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{name}: its shards do not fit together: {error}") from error


def _optimizer(folder: Path, mains: Sequence[Path], files: _Layers) -> dict[str, list[_Fragment]]:
    """Read the optimizer states of ZeRO stage 1 or of the bf16 optimizer; {} if there are none.

    Each replica has an equal partition of one flat tensor with the parameters of `param_shapes` in
    order, padded at the end. With `round_robin_gradients` the order differs: {}.
    """
    found: dict[str, list[_Fragment]] = {}
    for rank, main_file in enumerate(mains):
        rank_files = _optimizer_files(folder, rank)
        if not rank_files:
            return {}
        main = read_foreign(main_file)
        zero = (main.get("ds_config") or {}).get("zero_optimization") or {}
        if zero.get("round_robin_gradients"):
            return {}
        saved = [read_foreign(file)["optimizer_state_dict"] for file in rank_files]
        for group, shapes in enumerate(main["param_shapes"]):
            flat, steps = _flat_group(saved, group)
            start = 0
            for name, shape in shapes.items():
                fragments = found.setdefault(files.own_name(name), [])
                # Every stage has a copy of the tied embedding; the first stage's is used.
                if len(fragments) == rank % files.tensor:
                    fragments.append(_Fragment(tuple(shape), start, flat, steps))
                start += math.prod(shape)
    return found


def _flat_group(
    saved: Sequence[Mapping[str, Any]], group: int
) -> tuple[dict[str, FlatShard], float]:
    """Return the flat weights and states of a parameter group, and its step count."""
    states = []
    for replica in saved:
        base = replica["base_optimizer_state"]
        states.append(base["state"][group] if "state" in base else base[group])
    flat = {
        "fp32": FlatShard([r["single_partition_of_fp32_groups"][group].view(-1) for r in saved])
    }
    for name in _STATES:
        flat[name] = FlatShard([state[name].view(-1) for state in states])
    base = saved[0]["base_optimizer_state"]
    groups = base["param_groups"] if "state" in base else []
    steps = states[0].get("step", groups[group].get("step", 0) if groups else 0)
    return flat, float(steps)


def _layer_files(folder: Path) -> dict[int, list[Path]]:
    """List the files of every layer in the order of tensor-parallel ranks."""
    files: dict[int, dict[int, Path]] = {}
    for file in folder.glob("layer_*-model_*-model_states.pt"):
        if match := _LAYER.fullmatch(file.name):
            files.setdefault(int(match[1]), {})[int(match[2])] = file
    if not files:
        raise CheckpointError(
            f"{folder} has no files layer_LL-model_TT-model_states.pt: a checkpoint of a run "
            "with DeepSpeed's pipeline has them"
        )
    ranks = {len(by_rank) for by_rank in files.values()}
    is_complete = all(sorted(by_rank) == list(range(max(ranks))) for by_rank in files.values())
    if not is_complete:
        raise CheckpointError(f"{folder} lacks files of some tensor-parallel ranks of some layers")
    return {
        number: [by_rank[rank] for rank in sorted(by_rank)] for number, by_rank in files.items()
    }


def _main_files(folder: Path) -> list[Path]:
    found = [f for f in folder.glob("mp_rank_*") if _MAIN.fullmatch(f.name)]
    return sorted(found, key=lambda file: int(file.name.split("_")[2]))


def _optimizer_files(folder: Path, rank: int) -> list[Path]:
    """List the optimizer files of all replicas for one rank of the model, in the order of replicas."""
    found = [(m, f) for f in folder.glob("*optim_states.pt") if (m := _OPTIMIZER.fullmatch(f.name))]
    numbered = [(int(match[1]), file) for match, file in found if int(match[2]) == rank]
    return [file for _, file in sorted(numbered)]


def _require_one_order(saved_args: Mapping[str, Any], files: _Layers, folder: Path) -> None:
    """Refuse grouped-query attention of Microsoft's fork, whose versions order QKV rows in two ways."""
    groups = saved_args.get("num_key_value_heads")
    grouped = groups not in (None, saved_args.get("num_attention_heads"))
    if grouped and files.first_block != FIRST_LAYER:
        raise CheckpointError(
            f"{folder}: with --num-key-value-heads {groups} this program's versions order rows of "
            "queries, keys and values in two ways, and its files do not contain which: convert it to "
            "Hugging Face's format with that program, and import the result"
        )
