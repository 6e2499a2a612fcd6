"""A checkpoint of another program (Megatron-LM, BigScience, Meta) in our names and row order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.hugging_face.families.tensor_mapping import TurnedRows
from megatron.checkpointing.parameter_names import is_of_experts
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.common.errors import CheckpointError
from megatron.config.data.objective import ObjectiveName
from megatron.config.parsing.files import Values


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """Training state of another program.

    Args:
        values: settings of its network, as far as the files contain them.
        rows: of the token embedding, padding included.
        vocab_size: without padding; None if the files do not contain it.
        checkpoint: weights, and optimizer states if supported.
        state: fields of TrainState.
        has_optimizer: whether `checkpoint` has optimizer states.
        notices: a sentence for each part left out.
        objective: of the script that trains such a network.
    """

    folder: Path
    values: Values
    rows: int
    vocab_size: int | None
    checkpoint: FullCheckpoint
    state: Mapping[str, int] = field(default_factory=dict)
    has_optimizer: bool = False
    notices: Sequence[str] = ()
    objective: ObjectiveName = "gpt"


Latent = Mapping[tuple[str, ...], TurnedRows]
"""Order of rows in latent attention by the suffixes of names; {} in other networks."""

COLUMN = (
    "self_attention.query_key_value.weight",
    "self_attention.query_key_value.bias",
    "dense_h_to_4h.weight",
    "dense_h_to_4h.bias",
    *("self_attention.query.weight", "q_up.weight", "kv_up.weight", "self_attention.sinks"),
    *("inter_attention.query.weight", "inter_attention.query.bias"),
    *("inter_attention.key_value.weight", "inter_attention.key_value.bias"),
    "word_embeddings.weight",
    ".output_bias",
)
"""Suffixes of column-parallel parameters (sharded along rows of the weight)."""
ROW = ("self_attention.dense.weight", "inter_attention.dense.weight", "dense_4h_to_h.weight")
"""Suffixes of row-parallel parameters (sharded along columns of the weight)."""
_OF_QUERIES = ("self_attention.query.weight", "self_attention.q_up.weight")
_OF_KEYS = ("self_attention.kv_down.weight", "self_attention.kv_down.bias")
"""Suffixes of parameters of latent attention with rows that have rotary positions."""
_TO_QUERIES = ("self_attention.q_down.weight", "self_attention.q_down.bias")
"""Suffixes of parameters that make the latents of queries."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Row order of fused QKV and gate/up weights in the shards of Megatron-LM and its forks.

    Args:
        version: of Megatron-LM's checkpoints: 0 has {q, k, v}, heads, features; 1 has heads,
            features, {q, k, v}; from 2 on heads, {q, k, v}, features, as here. Keys and values of
            cross-attention likewise.
        head_dim: features per head.
        gate: index of the half with the gate; None for an ungated MLP.
        latent: order of rows with rotary positions in latent attention, by the suffixes of names.
        latent_sizes: rows of the full parameters that make latents, by the suffixes of names.
    """

    version: float
    head_dim: int
    gate: int | None
    latent: Latent = field(default_factory=dict)
    latent_sizes: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def join(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of the parameter `name` in our row order.

        Raises:
            ValueError: the shapes do not fit.
        """
        joined, turned = self._joined(name, shards), turned_rows(name, self.latent)
        return turned.from_hugging_face([joined]) if turned else joined

    def _joined(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        if is_of_experts(name):
            (experts,) = shards
            return self._experts(name, experts)
        if name.endswith(ROW):
            return shards[0] if len(shards) == 1 else torch.cat(tuple(shards), 1)
        sizes = self.latent_sizes.items()
        # Transformer Engine has copies of what makes latents, Megatron-LM's own layers have shards.
        is_sharded = any(name.endswith(ends) and len(shards[0]) != rows for ends, rows in sizes)
        if not (is_sharded or name.endswith(COLUMN)):
            return _merge_replicas(shards)
        if ".query_key_value." in name and self.version < 2:
            shards = [self._by_head(shard, 3) for shard in shards]
        elif ".key_value." in name and self.version < 2:
            shards = [self._by_head(shard, 2) for shard in shards]
        elif ".dense_h_to_4h." in name and self.gate is not None:
            shards = [self._in_pairs(shard) for shard in shards]
        return shards[0] if len(shards) == 1 else torch.cat(tuple(shards))

    def _experts(self, name: str, weights: Tensor) -> Tensor:
        """Return the weights of a layer's experts: [experts, ...]."""
        if name.endswith(".dense_4h_to_h.weight"):
            return weights.transpose(1, 2)
        if ".dense_h_to_4h." in name and self.gate is not None:
            return torch.stack([self._in_pairs(expert) for expert in weights])
        return weights

    def _by_head(self, shard: Tensor, parts: int) -> Tensor:
        if self.version == 0:
            return shard.unflatten(0, (parts, -1, self.head_dim)).transpose(0, 1).flatten(0, 2)
        return shard.unflatten(0, (-1, self.head_dim, parts)).transpose(1, 2).flatten(0, 2)

    def _in_pairs(self, shard: Tensor) -> Tensor:
        halves = shard.unflatten(0, (2, -1))
        gate, up = (halves[self.gate], halves[1 - self.gate]) if self.gate is not None else halves
        return torch.stack((gate, up), 1).flatten(0, 1)


def latent_rows(arguments: Mapping[str, Any], *, heads: int) -> Latent:
    """Return the order of rows with rotary positions in latent attention.

    Args:
        arguments: saved by Megatron-LM.
    """
    if not arguments.get("multi_latent_attention"):
        return {}
    turned = arguments["qk_pos_emb_head_dim"]
    return {
        _OF_QUERIES: TurnedRows(groups=heads, turned=turned, is_first=True),
        _OF_KEYS: TurnedRows(groups=1, turned=turned, is_first=False),
    }


def latent_sizes(arguments: Mapping[str, Any]) -> dict[tuple[str, ...], int]:
    """Return the rows of the full parameters that make latents, by the suffixes of names.

    Args:
        arguments: saved by Megatron-LM.
    """
    if not arguments.get("multi_latent_attention"):
        return {}
    return {
        _OF_KEYS: arguments["kv_lora_rank"] + arguments["qk_pos_emb_head_dim"],
        _TO_QUERIES: arguments.get("q_lora_rank") or 0,
    }


def turned_rows(name: str, latent: Latent) -> TurnedRows | None:
    """Return the order of rows of a parameter; None if it is as here."""
    return next((rows for ends, rows in latent.items() if name.endswith(ends)), None)


def progress_of(
    main: Mapping[str, Any], arguments: Mapping[str, Any], *, is_release: bool = False
) -> dict[str, int]:
    """Return the progress of the run that saved it, as in a manifest's state.

    Args:
        main: content of its main file; without an entry for tokens, samples are full.
        arguments: saved in it.
        is_release: whether it is published as weights of no iteration.
    """
    samples = int(arguments.get("consumed_train_samples") or 0)
    tokens = main.get("tokens") or arguments.get("consumed_train_tokens")
    return {
        "iteration": 0 if is_release else int(main.get("iteration", main.get("total_iters", 0))),
        "samples": samples,
        "tokens": int(tokens or samples * (arguments.get("seq_length") or 0)),
        "valid_samples": int(arguments.get("consumed_valid_samples") or 0),
    }


def gate_half(arguments: Mapping[str, Any]) -> int | None:
    """Return the index of the half with the gate: 0 for Megatron-LM's GLUs, 1 for BigScience's GLUs.

    None for an ungated MLP.

    Args:
        arguments: saved by these programs.
    """
    if arguments.get("swiglu") or arguments.get("quick_geglu"):
        return 0
    return 1 if arguments.get("glu_activation") else None


def _merge_replicas(shards: Sequence[Tensor]) -> Tensor:
    """Return a replicated parameter: the mean if rounding has made the copies differ."""
    first = shards[0]
    if all(torch.equal(first, other) for other in shards[1:]):
        return first
    return torch.stack([shard.float() for shard in shards]).mean(0).to(first.dtype)


def known_version(version: float, where: object) -> float:
    """Return `version`.

    Raises:
        CheckpointError: its row order is unknown.
    """
    if version not in (0, 1) and not 2 <= version < 4:
        raise CheckpointError(
            f"{where}: checkpoint_version {version} is unknown; known: 0, 1, 2 and 3"
        )
    return version
