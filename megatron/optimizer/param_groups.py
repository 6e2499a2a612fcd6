"""Which parameters are trained, which of them decay, and which are Muon's."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megatron.config.optimization.optimizer import OptimizerPlan


def plan_groups(model: nn.Module, plan: OptimizerPlan) -> list[dict[str, Any]]:
    """Freeze what the plan does not train; return the rest in groups.

    A network with adapters trains these alone.
    """
    if plan.biases_only:
        freeze_all_but(model, lambda name: name.endswith("bias"))
    elif any("lora_" in name for name, _ in model.named_parameters()):
        freeze_all_but(model, lambda name: "lora_" in name)
    return param_groups(model, plan.weight_decay, muon=plan.name == "muon")


def param_groups(
    model: nn.Module, weight_decay: float, *, muon: bool = False
) -> list[dict[str, Any]]:
    """Return the trained parameters in groups; none is empty.

    Matrices decay, biases and norms do not. `wd_mult` of a group is 1 or 0 accordingly, so that a
    decay that moves over the run knows where it applies. Experts are in groups of their own.

    Args:
        muon: whether the matrices of the layers, without the embeddings, are a group of their own;
            each group then says with `orthogonal` whether it is that one.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = {name for name, p in trained if _dimensions(p) > 1}
    layers = {name for name in matrices if muon and "embeddings" not in name}
    sets = [
        (layers, 1.0, {"orthogonal": True}),
        (matrices - layers, 1.0, {"orthogonal": False}),
        ({name for name, _ in trained} - matrices, 0.0, {"orthogonal": False}),
    ]
    groups = [
        {
            "params": [p for name, p in trained if name in names],
            "weight_decay": weight_decay * share,
            "wd_mult": share,
            **(mark if muon else {}),
        }
        for names, share, mark in sets
        if names
    ]
    return [part for group in groups for part in _experts_apart(group)]


def freeze_all_but(model: nn.Module, trains: Callable[[str], bool]) -> None:
    """Train the parameters alone whose name `trains` takes.

    Source: BitFit, arXiv:2106.10199, for biases; LoRA, arXiv:2106.09685, for adapters.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))


def _experts_apart(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `group` without experts, then these with the marks by which DeepSpeed knows them."""
    experts = [p for p in group["params"] if hasattr(p, "expert_share")]
    others = [p for p in group["params"] if not hasattr(p, "expert_share")]
    if others:
        yield {**group, "params": others}
    if experts:
        yield {**group, "params": experts, "moe": True, "name": experts[0].group_name}


def _dimensions(parameter: nn.Parameter) -> int:
    # ZeRO stage 3 leaves an empty tensor in the place of a weight, with the whole's shape on it.
    return len(getattr(parameter, "ds_shape", parameter.shape))
