"""How much must be read, and imported, to have one part alone."""

import pytest
from source import REPOSITORY, import_graph, imported_modules, reached

BUDGETS = {
    "megatron.model.gpt": 49,
    "megatron.objectives.gpt": 50,
    "megatron.engine.build": 92,
    "pretrain_gpt.py": 284,
}
"""Most modules of the package that each may reach, itself included. Lower them where you can."""


def closure(*starts: str) -> set[str]:
    """Return `starts`, modules of the package or a script, and all modules that they reach."""
    graph = import_graph()
    for script in starts:
        if script.endswith(".py"):
            names = imported_modules(REPOSITORY / script)
            parents = [name.rpartition(".")[0] for name in names]
            graph[script] = {*names, *parents} & graph.keys()
    return reached(graph, *starts) - {name for name in starts if name.endswith(".py")}


@pytest.mark.parametrize("start", BUDGETS)
def test_a_part_needs_few_modules(start: str) -> None:
    needed = closure(start)
    assert len(needed) <= BUDGETS[start], sorted(needed)


def test_the_network_needs_no_flags() -> None:
    flags = {"megatron.config.config", "megatron.config.parsing.flags"}
    assert closure("megatron.model.gpt").isdisjoint(flags)


def test_resolved_dataclasses_of_the_network_are_leaves() -> None:
    leaves = {
        f"megatron.config.{name}" for name in ("network.model_spec", "parallelism.kernels_plan")
    }
    # Its parts stand with their settings.
    settings = {
        f"megatron.config.network.{name}"
        for name in (
            "model",
            "spec_part",
            "experts",
            "layer_pattern",
            "latent",
            "lora",
            "prediction",
        )
    }
    registry = {f"megatron.common.{name}" for name in ("registry", "extensions", "errors")}
    others = {"megatron.config.parallelism.recompute_plan", "megatron.config.parsing.declaration"}
    assert closure(*leaves) - leaves <= settings | registry | others
