"""Checkpoints of DeepSpeed's forks of Megatron-LM: a file for each layer and tensor-parallel rank.

BigScience's and Microsoft's programs number layers differently; what a file holds says what it is.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.megatron_lm.arguments import flags_of
from megatron.checkpointing.megatron_lm.foreign_checkpoint import (
    ForeignCheckpoint,
    Rows,
    known_version,
)
from megatron.checkpointing.names import LATEST
from megatron.checkpointing.resharding.sharded_tensor import (
    FlatShard,
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    unsharded,
)
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.common.errors import CheckpointError

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_MAIN = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FIRST_LAYER = 3  # its number in our list of layers
_STATES = ("exp_avg", "exp_avg_sq")


def checkpoint_in(path: Path) -> Path:
    """Return the folder that `latest` in `path` names, or `path` if it has layers itself.

    Raises:
        CheckpointError: there is none.
    """
    hint = path / LATEST
    if any(path.glob("layer_*-model_*-model_states.pt")) or not hint.is_file():
        return path
    return path / hint.read_text(encoding="utf-8").strip()


def find(path: Path) -> ForeignCheckpoint:
    """Return what the checkpoint in `path` holds; tensors are read when they are looked at.

    Raises:
        CheckpointError: it is none, or not as these programs lay it out.
    """
    folder = checkpoint_in(path)
    layers, mains = _layer_files(folder), _main_files(folder)
    main = read_foreign(mains[0]) if mains else {}
    arguments = main.get("args")
    if arguments is None:
        raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt with arguments")
    said = vars(arguments)
    try:
        files = _Layers(layers, untied=bool(said.get("untie_embeddings_and_output_weights")))
        _require_one_order(said, files, folder)
        rows = Rows(
            version=known_version(float(main.get("checkpoint_version", 3)), folder),
            head_dim=said.get("kv_channels") or said["hidden_size"] // said["num_attention_heads"],
            gate=0 if said.get("swiglu") else 1 if said.get("glu_activation") else None,
        )
        trained = _optimizer(folder, mains, files) if mains else {}
    except (KeyError, AttributeError, TypeError, ValueError, StopIteration) as error:
        raise CheckpointError(f"{folder}: not as BigScience lays it out: {error!r}") from error
    complete = bool(trained) and set(trained) == set(files.names)
    makers = {
        name: partial(_trained, rows, name, trained[name])
        if complete
        else partial(_weight, rows, name, files)
        for name in files.names
    }
    info = main.get("checkpoint_info") or {}
    return ForeignCheckpoint(
        folder=folder,
        flags=flags_of(arguments),
        rows=sum(len(shard) for shard in files.shards(files.table)),
        vocab_size=info.get("original_vocab_size"),
        whole=FullCheckpoint(
            parameters=LazyParameters(makers),
            counters={
                name: int(main.get(name, 0))
                for name in ("global_steps", "global_samples", "skipped_steps")
            },
        ),
        state={
            "iteration": int(main.get("iteration", 0)),
            "samples": int(said.get("consumed_train_samples") or 0),
            "tokens": int(main.get("tokens") or 0),
            "valid_samples": int(said.get("consumed_valid_samples") or 0),
            "skipped": int(main.get("skipped_steps", 0)),
        },
        has_optimizer=complete,
        notices=[] if complete else ["the optimizer's states are not there: weights alone"],
    )


class _Layers:
    """Which file holds which parameter of ours.

    Args:
        files: by number, those of every tensor-parallel rank.
        untied: whether the head has a table of its own.
    """

    def __init__(self, files: Mapping[int, Sequence[Path]], *, untied: bool):
        self._files = files
        self._where: dict[str, tuple[int, str]] = {}
        self.renumbered: dict[int, int] = {}
        blocks = 0
        for number in sorted(files):
            keys = [key for key in self._read(number)[0] if not key.endswith("inv_freq")]
            if "word_embeddings.weight" in keys and blocks == 0:
                place = "1" if untied else "tied_modules.embed"
            elif "input_layernorm.weight" in keys:
                self.renumbered[number] = _FIRST_LAYER + blocks
                place = str(_FIRST_LAYER + blocks)
                blocks += 1
            elif keys and not untied and any("word_embeddings" in key for key in keys):
                continue  # the last stage's copy of the table
            else:
                head = keys[0].startswith(("lm_head.", "word_embeddings."))
                self.renumbered[number] = _FIRST_LAYER + blocks + (2 if head else 1)
                place = str(self.renumbered[number])
            for key in keys:
                own = key.replace("lm_head.", "word_embeddings.")
                self._where[f"{place}.{own}"] = number, key
        self.names = list(self._where)
        self.table = next(name for name in self.names if name.endswith("word_embeddings.weight"))
        self.first_block = min(n for n, own in self.renumbered.items() if own == _FIRST_LAYER)

    def _read(self, number: int) -> list[Mapping[str, Tensor]]:
        return [read_foreign(file) for file in self._files[number]]

    def shards(self, name: str) -> list[Tensor]:
        """Return the shards of the parameter that we call `name`."""
        number, key = self._where[name]
        return [rank[key] for rank in self._read(number)]

    def own_name(self, name: str) -> str:
        """Return what we call the parameter that DeepSpeed's module calls `name`."""
        number, _, rest = name.partition(".")
        if not number.isdigit() or int(number) == 1:
            return name
        return f"{self.renumbered[int(number)]}.{rest.replace('lm_head.', 'word_embeddings.')}"

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return len(next(iter(self._files.values())))


def _weight(rows: Rows, name: str, files: _Layers) -> ParameterState:
    try:
        return ParameterState(weight=unsharded(rows.whole(name, files.shards(name))))
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name}: its shards do not fit together: {error}") from error


@dataclass(frozen=True)
class _Fragment:
    """A shard of a trained parameter in the flat tensors that replicas divide between them."""

    shape: tuple[int, ...]
    start: int
    flat: Mapping[str, FlatShard]
    steps: float

    def tensor(self, state: str) -> Tensor:
        """Return the shard's elements, of its weight ("fp32") or of a state."""
        found = self.flat[state].flat(self.start, self.start + math.prod(self.shape))
        return found.view(self.shape)


def _trained(rows: Rows, name: str, fragments: Sequence[_Fragment]) -> ParameterState:
    """Return a parameter with what the optimizer keeps of it, its weight in 32 bits."""

    def whole(state: str) -> Tensor:
        return rows.whole(name, [fragment.tensor(state) for fragment in fragments])

    try:
        return ParameterState(
            weight=unsharded(whole("fp32")),
            states={state: unsharded(whole(state)) for state in _STATES},
            steps=fragments[0].steps,
        )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{name}: its shards do not fit together: {error}") from error


def _optimizer(folder: Path, mains: Sequence[Path], files: _Layers) -> dict[str, list[_Fragment]]:
    """Return the shards of every trained parameter, as the states of ZeRO's stage 1 hold them.

    Each replica has an equal part of one flat tensor, in which the parameters of `param_shapes`
    follow each other; its end is padding. Nothing where there are no such files, or where the
    order of parameters is another one.
    """
    found: dict[str, list[_Fragment]] = {}
    for rank, main_file in enumerate(mains):
        own = _optimizer_files(folder, rank)
        if not own:
            return {}
        main = read_foreign(main_file)
        zero = (main.get("ds_config") or {}).get("zero_optimization") or {}
        if zero.get("round_robin_gradients"):
            return {}
        saved = [read_foreign(file)["optimizer_state_dict"] for file in own]
        for group, shapes in enumerate(main["param_shapes"]):
            flat, steps = _flat_group(saved, group)
            start = 0
            for name, shape in shapes.items():
                fragments = found.setdefault(files.own_name(name), [])
                # Of the tied table every stage has a copy; the first stage's counts.
                if len(fragments) == rank % files.tensor:
                    fragments.append(_Fragment(tuple(shape), start, flat, steps))
                start += math.prod(shape)
    return found


def _flat_group(
    saved: Sequence[Mapping[str, Any]], group: int
) -> tuple[dict[str, FlatShard], float]:
    """Return the flat weights and states of a group of parameters, and the steps it has taken."""
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
    """Return the files of every layer, in the order of tensor-parallel ranks."""
    files: dict[int, dict[int, Path]] = {}
    for file in folder.glob("layer_*-model_*-model_states.pt"):
        if match := _LAYER.fullmatch(file.name):
            files.setdefault(int(match[1]), {})[int(match[2])] = file
    if not files:
        raise CheckpointError(
            f"{folder} has no files layer_LL-model_TT-model_states.pt: a checkpoint of a run "
            "with DeepSpeed's pipeline has them"
        )
    ranks = {len(own) for own in files.values()}
    whole = all(sorted(own) == list(range(max(ranks))) for own in files.values())
    if not whole:
        raise CheckpointError(f"{folder} lacks files of some tensor-parallel ranks of some layers")
    return {number: [own[rank] for rank in sorted(own)] for number, own in files.items()}


def _main_files(folder: Path) -> list[Path]:
    found = [f for f in folder.glob("mp_rank_*") if _MAIN.fullmatch(f.name)]
    return sorted(found, key=lambda file: int(file.name.split("_")[2]))


def _optimizer_files(folder: Path, rank: int) -> list[Path]:
    """Return the files of all replicas of a rank of the model, the first replica's first."""
    found = [(m, f) for f in folder.glob("*optim_states.pt") if (m := _OPTIMIZER.fullmatch(f.name))]
    own = [(int(match[1]), file) for match, file in found if int(match[2]) == rank]
    return [file for _, file in sorted(own)]


def _require_one_order(said: Mapping[str, Any], files: _Layers, folder: Path) -> None:
    """Refuse groups of queries of Microsoft's fork, whose versions order rows in two ways."""
    groups = said.get("num_key_value_heads")
    grouped = groups not in (None, said.get("num_attention_heads"))
    if grouped and files.first_block != _FIRST_LAYER:
        raise CheckpointError(
            f"{folder}: with --num-key-value-heads {groups} this program's versions order rows of "
            "queries, keys and values in two ways, and its files do not say which: bring it to "
            "Hugging Face's format with that program, and import that"
        )
