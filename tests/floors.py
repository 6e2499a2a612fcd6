"""The floors of the package: a part imports only parts of floors below its own."""

from collections import defaultdict
from pathlib import Path

from source import PACKAGE, imported_modules, module_name

FLOORS = [
    {"common"},
    {"config"},
    {"pipeline"},
    {"planner"},
    {"tensor_parallel", "fused_kernels", "tokenizer", "optimizer"},
    {"data"},
    {"model"},
    {"checkpointing"},
    {"engine", "inference.runner"},
    {"objectives", "inference.engine"},
    {"training"},
    {"inference.loading"},
    {"inference.evaluation", "inference.server", "diagnostics", "api"},
    {
        *("extensions.masked_lm", "extensions.corpora", "extensions.openai_api"),
        *("extensions.chaos", "extensions.hybrid"),
    },
    {"extensions.bert", "extensions.t5", "extensions.detox"},
    {"extensions.tasks"},
    {"extensions.retro", "extensions.nemo"},
]
FLOOR_OF = {part: height for height, floor in enumerate(FLOORS) for part in floor}


def part_of(module: str) -> str:
    """Return the part of the package that a module lies in: a package, or one of some packages."""
    _, *names = module.split(".")
    return ".".join(names[: 2 if names[0] in ("inference", "extensions") else 1])


def imports_between_parts(package: Path = PACKAGE) -> dict[tuple[str, str], list[str]]:
    """Return {(importing part, imported part): ['file: module']}."""
    found = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        if file.name == "__init__.py":
            continue
        here = part_of(module_name(file, package))
        for module in imported_modules(file):
            if module.startswith(f"{package.name}.") and (there := part_of(module)) != here:
                found[here, there].append(f"{file.relative_to(package)}: {module}")
    return found


def packages_as_mermaid() -> str:
    """Draw the parts by floor and their imports, without arrows that follow from others."""
    below = defaultdict(set)
    for here, there in imports_between_parts():
        if FLOOR_OF[there] < FLOOR_OF[here]:
            below[here].add(there)

    def reached(part: str) -> set[str]:
        return below[part].union(*(reached(other) for other in below[part]))

    lines = ["flowchart TD"]
    for height, floor in reversed([*enumerate(FLOORS)]):
        names = "; ".join(f"{_id(part)}[{part.replace('.', '/')}]" for part in sorted(floor))
        lines.append(f"    subgraph floor{height}[ ]; direction LR; {names}; end")
    for here in sorted(below):
        direct = below[here] - set().union(*(reached(other) for other in below[here]))
        lines += [f"    {_id(here)} --> {_id(there)}" for there in sorted(direct)]
    return "\n".join(lines)


def _id(part: str) -> str:
    return part.replace(".", "_")
