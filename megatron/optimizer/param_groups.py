"""Parameter groups: with or without weight decay, Muon, experts."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from megatron.config.optimization.optimizer import OptimizerPlan

_QK_NORM = re.compile(r"\b(q|k|kv)_layernorm\.")


def plan_groups(model: nn.Module, plan: OptimizerPlan) -> list[dict[str, Any]]:
    """Return the trained parameters in the groups of the plan; see `param_groups`."""
    return param_groups(
        model,
        plan.weight_decay,
        muon=plan.name == "muon",
        decays_qk_norms=plan.decays_qk_norms,
        embeddings_apart=plan.embeddings_apart,
    )


def param_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    muon: bool = False,
    decays_qk_norms: bool = False,
    embeddings_apart: bool = False,
) -> list[dict[str, Any]]:
    """Return the trained parameters in non-empty groups.

    Weight decay applies to matrices, not to biases and norms; `wd_mult` of a group is 1 or 0, for
    schedules of the weight decay. Experts have groups of their own.

    Args:
        muon: whether matrices of layers, without embeddings, have their own group, marked
            `orthogonal`.
        decays_qk_norms: whether the norms of queries and keys decay too.
        embeddings_apart: whether the token embedding and the output layer have their own group,
            marked `embedding`, for a learning rate of their own.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # Of the biases of experts, a tensor has those of all.
    matrices = {name for name, p in trained if dimensions(p) > 1 and not name.endswith(".bias")}
    # Values that a function draws are no matrix of a product, such as those of a convolution.
    drawn = {name for name, p in trained if callable(getattr(p, "initial", None))}
    layers = {name for name in matrices - drawn if muon and "embeddings" not in name}
    norms = {n for n, _ in trained if decays_qk_norms and _QK_NORM.search(n)}
    embeddings = {n for n in matrices if embeddings_apart and n.endswith("word_embeddings.weight")}
    decayed = (matrices | norms) - layers
    rest = {name for name, _ in trained} - layers - decayed
    mark = {"orthogonal": False} if muon else {}
    sets: list[tuple[set[str], float, dict[str, bool]]] = [
        (layers, 1.0, {"orthogonal": True}),
        (decayed - embeddings, 1.0, mark),
        (embeddings, 1.0, mark | {"embedding": True}),
        (rest, 0.0, mark),
    ]
    groups = [
        {
            "params": [p for name, p in trained if name in names],
            "weight_decay": weight_decay * share,
            "wd_mult": share,
            **mark,
        }
        for names, share, mark in sets
        if names
    ]
    return [part for group in groups for part in _experts_apart(group)]


def in_buckets(
    groups: Iterable[dict[str, Any]], size: int, alone: frozenset[nn.Parameter] = frozenset()
) -> list[dict[str, Any]]:
    """Cut groups into groups of consecutive parameters, of at most `size` elements.

    A parameter stays whole, and may have more. What is left over is in a group's first part: backward
    ends with it. Muon's matrices stay together: a rank works on the matrices that its part of a group
    touches, and a part of each bucket would touch most of them.

    Args:
        alone: parameters that get a group of their own.
    """
    return [
        {**group, "params": part}
        for group in groups
        for part in (
            [group["params"]] if group.get("orthogonal") else _parts(group["params"], size, alone)
        )
    ]


def _parts(
    parameters: Sequence[nn.Parameter], size: int, alone: frozenset[nn.Parameter]
) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = []
    left = 0
    for parameter in reversed(parameters):
        if not parts or parameter in alone or parameter.numel() > left:
            parts.append([])
            left = size
        parts[-1].append(parameter)
        left = 0 if parameter in alone else left - parameter.numel()
    return [part[::-1] for part in reversed(parts)]


def _experts_apart(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Split `group` into other parameters and experts, the latter with DeepSpeed's marks."""
    experts = [p for p in group["params"] if hasattr(p, "expert_share")]
    others = [p for p in group["params"] if not hasattr(p, "expert_share")]
    if others:
        yield {**group, "params": others}
    if experts:
        yield {**group, "params": experts, "moe": True, "name": experts[0].group_name}


def dimensions(parameter: nn.Parameter) -> int:
    """Return the number of dimensions of a parameter, divided by ZeRO or not."""
    # ZeRO stage 3 replaces a weight by an empty tensor with the full shape in `ds_shape`.
    return len(getattr(parameter, "ds_shape", parameter.shape))
