"""Read a GPT in the layers of megatron.core's HybridModel, of which two are one layer of a GPT."""

import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.common.errors import CheckpointError

T = TypeVar("T")

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_FINAL_NORM = "decoder.final_norm."
_KINDS = (
    ("mixer.", "M", "a Mamba layer"),
    ("self_attention.in_proj", "G", "a gated DeltaNet layer"),
    ("self_attention.core_attention.indexer", "D", "sparse attention"),
    ("self_attention.linear_kv", "+", "latent attention"),
    ("self_attention.linear_qkv", "*", "attention"),
    ("mlp.router", "E", "a layer with experts"),
    ("mlp.linear_fc1", "-", "an MLP"),
)
"""Beginning of a name in a layer of each kind, its letter in --hybrid-layer-pattern, and its name.
The first that fits counts."""


def is_hybrid(names: Collection[str]) -> bool:
    """Whether parameters of these names are a HybridModel's."""
    return any(name.startswith(_FINAL_NORM) for name in names)


def gpt_of_hybrid(
    parameters: Mapping[str, T], arguments: Any, folder: Path
) -> tuple[dict[str, T], Any]:
    """Return the parameters by the names of a GPT, and the arguments of that GPT.

    Args:
        arguments: those in the files; None if there are none.

    Raises:
        CheckpointError: its layers are not a GPT's: attention, then an MLP or experts.
    """
    pattern = _pattern(parameters, folder)
    found = {}
    for name, parameter in parameters.items():
        if match := _LAYER.fullmatch(name):
            name = f"decoder.layers.{int(match[1]) // 2}.{match[2]}"
        found[name.replace(_FINAL_NORM, "decoder.final_layernorm.")] = parameter
    if arguments is None:
        return found, None
    frequency = [int(kind == "E") for kind in pattern[1::2]]
    own = {**vars(arguments), "num_layers": len(frequency), "moe_layer_freq": frequency}
    if not any(frequency):
        own["num_experts"] = None
    return found, Namespace(**own)


def _pattern(parameters: Collection[str], folder: Path) -> str:
    """Return the letters of the layers' kinds.

    Raises:
        CheckpointError: names the first layer that a GPT does not have there.
    """
    layers: dict[int, list[str]] = {}
    for name in parameters:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), []).append(match[2])
    kinds = [_kind(layers[number]) for number in sorted(layers)]
    pattern = "".join(letter for letter, _ in kinds)
    for number, (letter, kind) in enumerate(kinds):
        if letter not in ("-E" if number % 2 else "*"):
            raise CheckpointError(
                f"{folder} is a HybridModel with the layers {pattern}, which are not a GPT's: "
                f"layer {number} is {kind}; only layers of attention, each followed by an MLP or "
                "experts (*- or *E), are read"
            )
    if not pattern or len(pattern) % 2 or sorted(layers) != list(range(len(pattern))):
        raise CheckpointError(f"{folder}: layers are missing: there are {pattern or 'none'}")
    return pattern


def _kind(names: Collection[str]) -> tuple[str, str]:
    """Return the letter and the name of the kind of a layer with these parameters."""
    kinds = ((letter, kind) for start, letter, kind in _KINDS if _has(names, start))
    return next(kinds, ("?", "of an unknown kind"))


def _has(names: Collection[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)
