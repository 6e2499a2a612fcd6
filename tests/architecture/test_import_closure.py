"""How much must be read, and imported, to have one part alone."""

from source import PACKAGE, imported_modules, module_name

MOST_FOR_THE_NETWORK = 41


def closure(start: str) -> set[str]:
    """Return `start` and all modules of the package that it reaches by imports."""
    files = {module_name(file): file for file in PACKAGE.rglob("*.py")}
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in reached or files[module].name == "__init__.py":
            continue
        reached.add(module)
        for name in imported_modules(files[module]):
            waiting += [each for each in (name, name.rpartition(".")[0]) if each in files]
    return reached


def test_the_network_needs_few_modules_and_no_flags():
    needed = closure("megatron.model.gpt")
    assert len(needed) <= MOST_FOR_THE_NETWORK, sorted(needed)
    flags = {"megatron.config.config", "megatron.config.parsing.flags"}
    assert needed.isdisjoint(flags)


def test_resolved_dataclasses_of_the_network_are_leaves():
    leaves = {
        f"megatron.config.{name}" for name in ("network.model_spec", "parallelism.kernels_plan")
    }
    others = set().union(*map(closure, leaves)) - leaves
    registry = {"megatron.common.registry", "megatron.common.errors"}
    assert others <= {"megatron.config.parallelism.recompute_plan", *registry}
