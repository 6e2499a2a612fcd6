"""Read Meta's Llama checkpoints: `params.json`, and `consolidated.NN.pth` for each TP rank.

Source: arXiv:2302.13971, section 2.2; arXiv:2307.09288, section 2.2.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.megatron_lm.foreign_checkpoint import ForeignCheckpoint
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.sharded_tensor import (
    FullCheckpoint,
    LazyParameters,
    ParameterState,
    wrap_full_tensor,
)
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.common.errors import CheckpointError
from megatron.config.parsing.files import Values

PARAMETERS = "params.json"
_SEQUENCE = 4096  # of Llama 2; the files do not contain it


def find(path: Path) -> ForeignCheckpoint:
    """Read the files in `path`; tensors are read on access.

    Raises:
        CheckpointError: they are not Llama's.
    """
    files = sorted(path.glob("consolidated.*.pth"))
    try:
        params = dict(json.loads((path / PARAMETERS).read_text(encoding="utf-8")))
        if not files:
            raise CheckpointError(f"{path} has no files consolidated.NN.pth")
        ranks = [read_foreign(file) for file in files]
        network = _Network(
            layers=params["n_layers"],
            width=params["dim"],
            heads=params["n_heads"],
            groups=params.get("n_kv_heads") or params["n_heads"],
            ranks=ranks,
        )
        inner = sum(rank["layers.0.feed_forward.w1.weight"].shape[0] for rank in ranks)
        rows = sum(rank["output.weight"].shape[0] for rank in ranks)
        dtype = ranks[0]["output.weight"].dtype
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: not Meta's files of Llama: {error!r}") from error
    return ForeignCheckpoint(
        folder=path,
        values={**_values(params, inner, dtype), **_tokenizer(path, rows)},
        rows=rows,
        vocab_size=rows,
        checkpoint=FullCheckpoint(
            parameters=LazyParameters(
                {name: partial(_load_parameter, name, make) for name, make in network.makers()}
            )
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Network:
    layers: int
    width: int
    heads: int
    groups: int
    ranks: Sequence[Mapping[str, Tensor]]

    def makers(self) -> Iterator[tuple[str, Any]]:
        """Yield each of our parameter names with a function that loads it."""
        names = ParameterNames(num_layers=self.layers, tied=False)
        for module, load in self._modules():
            yield names.parameter(f"{module}.weight"), load

    def _modules(self) -> Iterator[tuple[str, Any]]:
        yield "embedding.word_embeddings", self._table
        for layer in range(self.layers):
            name = f"layers.{layer}."
            yield f"{name}input_layernorm", self._one(f"{name}attention_norm.weight")
            yield f"{name}self_attention.query_key_value", partial(self._qkv, name)
            wo, w2 = f"{name}attention.wo.weight", f"{name}feed_forward.w2.weight"
            yield f"{name}self_attention.dense", partial(self._join, wo, 1)
            yield f"{name}post_attention_layernorm", self._one(f"{name}ffn_norm.weight")
            yield f"{name}mlp.dense_h_to_4h", partial(self._gate_up, name)
            yield f"{name}mlp.dense_4h_to_h", partial(self._join, w2, 1)
        yield "final_layernorm", self._one("norm.weight")
        yield "output_layer", partial(self._join, "output.weight", 0)

    def _one(self, name: str) -> Any:
        return lambda: self.ranks[0][name]

    def _join(self, name: str, dim: int) -> Tensor:
        return torch.cat([rank[name] for rank in self.ranks], dim)

    def _table(self) -> Tensor:
        # Llama 1 and 2 divide its columns, Llama 3 its rows.
        shard = self.ranks[0]["tok_embeddings.weight"]
        return self._join("tok_embeddings.weight", 0 if shard.shape[1] == self.width else 1)

    def _qkv(self, layer: str) -> Tensor:
        """Fuse QKV to rows [groups, {queries, key, value}, head_dim] with rotary pairs in halves.

        Meta rotates features 2i and 2i + 1 together; here i and i + head_dim / 2.
        """
        query, key, value = (self._join(f"{layer}attention.w{x}.weight", 0) for x in "qkv")
        head_dim = self.width // self.heads
        parts = [
            _halves(query.unflatten(0, (self.groups, -1, head_dim))),
            _halves(key.unflatten(0, (self.groups, 1, head_dim))),
            value.unflatten(0, (self.groups, 1, head_dim)),
        ]
        return torch.cat(parts, 1).flatten(0, 2)

    def _gate_up(self, layer: str) -> Tensor:
        gate, up = (self._join(f"{layer}feed_forward.w{n}.weight", 0) for n in (1, 3))
        return torch.stack((gate, up), 1).flatten(0, 1)


def _halves(heads: Tensor) -> Tensor:
    return torch.cat((heads[:, :, 0::2], heads[:, :, 1::2]), 2)


def _load_parameter(name: str, make: Any) -> ParameterState:
    try:
        return ParameterState(weight=wrap_full_tensor(make()))
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{name}: its shards are missing or do not fit: {error}") from error


def _values(params: Mapping[str, Any], inner: int, dtype: torch.dtype) -> Values:
    heads, groups = params["n_heads"], params.get("n_kv_heads")
    is_grouped = bool(groups) and groups != heads
    return {
        **{"num_layers": params["n_layers"], "hidden_size": params["dim"]},
        **{"num_attention_heads": heads, "ffn_hidden_size": inner},
        **{"seq_length": _SEQUENCE, "layernorm_epsilon": params["norm_eps"]},
        **({"group_query_attention": True, "num_query_groups": groups} if is_grouped else {}),
        "position_embedding_type": "rotary",
        "rotary_base": params.get("rope_theta", 1e4),
        "use_rope_scaling": bool(params.get("use_scaled_rope")),
        **{"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True},
        **{"untie_embeddings_and_output_weights": True, "attention_dropout": 0},
        "hidden_dropout": 0,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def _tokenizer(path: Path, rows: int) -> Values:
    """Return the settings of Llama 1 or 2's SentencePiece tokenizer, if its file is there."""
    for folder in (path, path.parent):
        if rows == 32000 and (folder / "tokenizer.model").is_file():
            # These models were trained on texts that start with BOS.
            return {
                "tokenizer_type": "Llama2Tokenizer",
                "tokenizer_sentencepiece_legacy": True,
                "tokenizer_model": folder / "tokenizer.model",
            }
    return {}
