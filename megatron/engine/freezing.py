"""Which parameters are trained: all, biases, or adapters, without those that --freeze matches."""

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

import torch.distributed as dist
from torch import nn

from megatron.common.errors import ConfigError
from megatron.config.optimization.optimizer import OptimizerPlan
from megatron.optimizer.param_groups import dimensions
from megatron.tensor_parallel.object_collectives import all_gather_objects

_HEAD, _POOLER = "classification_head.", "pooler."
"""Parts of the names of a classification head's weights, which BitFit and LoRA train too."""

_SHOWN = 3


def freeze(
    model: nn.Module,
    plan: OptimizerPlan,
    module_name: Callable[[str], str] = str,
    *,
    adapters_only: bool = False,
) -> None:
    """Freeze the parameters that the plan does not train.

    BitFit trains biases, LoRA adapters; both also train the head of a downstream task with its pooler,
    which a pretrained network may lack. Parameters that --freeze matches are frozen in any case.

    Args:
        adapters_only: whether the network has LoRA adapters, here or on other pipeline stages.
        module_name: returns the layout-independent name of a parameter, which --freeze matches.

    Raises:
        ConfigError: --freeze matches nothing, or leaves a rank without something to train that other
            ranks train.

    Communication: with --freeze, one all-gather of names over all ranks.
    Source: BitFit, arXiv:2106.10199, for biases; LoRA, arXiv:2106.09685, for adapters.
    """
    names = [name for name, _ in model.named_parameters()]
    # In the pretraining of an encoder the pooler is one layer of the network among others.
    heads = (_HEAD, _POOLER) if any(_HEAD in name for name in names) else ()
    for name, parameter in model.named_parameters():
        chosen = name.endswith("bias") if plan.biases_only else "lora_" in name
        chosen |= any(part in name for part in heads) or not (plan.biases_only or adapters_only)
        parameter.requires_grad_(chosen and not plan.freezes(module_name(name)))
    if plan.frozen:
        _require_equal_groups(model, plan, module_name)


def _require_equal_groups(
    model: nn.Module, plan: OptimizerPlan, module_name: Callable[[str], str]
) -> None:
    """Refuse patterns without a match, and ranks that train other kinds of parameters than the rest.

    Without parameters of a kind a rank would leave out collectives of it that the others wait for, such
    as those of experts.
    """
    found = {
        module_name(name): (
            "experts"
            if hasattr(p, "expert_share")
            else "matrices"
            if dimensions(p) > 1
            else "norms and biases",
            p.requires_grad,
        )
        for name, p in model.named_parameters()
    }
    ranks = all_gather_objects(found) if dist.is_initialized() else [found]
    names = [*dict.fromkeys(name for rank in ranks for name in rank)]
    for pattern in plan.frozen:
        if not any(re.search(pattern, name) for name in names):
            near = ", ".join(_nearest(pattern, names))
            raise ConfigError(f"--freeze {pattern} matches no parameter; near it are {near}")
    trained = [{kind for kind, is_trained in rank.values() if is_trained} for rank in ranks]
    for rank, kinds in enumerate(trained):
        if missing := set.union(*trained) - kinds:
            raise ConfigError(
                f"--freeze leaves rank {rank} no {' or '.join(sorted(missing))} to train, which other "
                "pipeline stages do: freeze less, or write fewer stages "
                "(--pipeline-model-parallel-size)"
            )
    if not any(trained):
        raise ConfigError(f"--freeze {' '.join(plan.frozen)} leaves nothing to train")


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that are most like a pattern, or have a part that is."""

    def likeness(name: str) -> float:
        return max(
            SequenceMatcher(None, pattern, part).ratio() for part in (name, *name.split("."))
        )

    return sorted(names, key=likeness, reverse=True)[:_SHOWN]
