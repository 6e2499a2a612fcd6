"""How many weights --freeze freezes, as far as it names modules."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.config.architecture.architecture import Entry, Stacks, network_of
from megatron.config.architecture.counts import Weights, attention_weights, norm_width
from megatron.config.plan.plan import Plan

_TASK = "classification_head."


def with_frozen(plan: Plan, entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of a network with the numbers of their frozen weights.

    A module is frozen if the beginning of its names is, such as layers.0.mlp. for one of layer 1. Patterns
    that name single parameters of a module freeze more than is counted.
    """
    prefixes = [*network_of(plan.model).prefixes(Stacks.of_spec(plan.model))]

    def modules(index: int, entry: Entry) -> Iterator[str]:
        begin = f"tied_modules.{entry.tie}." if entry.tie else f"{index}."
        found = (module for name, module in prefixes if name.startswith(begin))
        # An entry has the output layer or the head of a task.
        return (each for each in found if each.startswith(_TASK) == (entry.kind == "task"))

    return [
        replace(entry, frozen=_frozen(plan, entry, [*modules(index, entry)]))
        for index, entry in enumerate(entries)
    ]


def _frozen(plan: Plan, entry: Entry, modules: Sequence[str]) -> Weights:
    spec, freezes = plan.model, plan.optimizer.freezes
    if modules and all(map(freezes, modules)):
        return entry.weights
    if entry.kind != "block":
        return Weights()
    attention = Weights(attention_weights(spec, plan.parallel.tensor))
    norms = Weights(spec.norm.per_layer * norm_width(spec, spec.hidden_size))
    total = Weights()
    for module in modules:
        if freezes(f"{module}self_attention."):
            total += attention
        if freezes(f"{module}mlp."):
            total += entry.weights - attention - norms
        elif freezes(f"{module}mlp.experts."):
            total += Weights(experts=entry.weights.experts)
    return total
