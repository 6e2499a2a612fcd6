"""Tell what is in a checkpoint: `show.py PATH`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.names import checkpoint_of
from megatron.config.checkpoint_tools import LookConfig
from megatron.config.flags import parse_sections
from megatron.tool import run_tool


def main(argv: Sequence[str]) -> None:
    """Print what the command line `argv` asks for."""
    if argv and not argv[0].startswith("-"):
        argv = ["--path", *argv]
    said = parse_sections(argv, {"look": LookConfig}, description=__doc__ or "").sections
    config: LookConfig = said["look"]
    folder = checkpoint_of(Path(config.path))
    manifest = read_manifest(folder)
    for line in (*_summary(folder, manifest), *_tensors(folder, manifest, each=config.parameters)):
        print(line)


def _summary(folder: Path, manifest: Manifest) -> Iterator[str]:
    parallel, state = manifest.plan["parallel"], manifest.state
    yield f"checkpoint: {folder}"
    yield " | ".join(f"{name}: {value}" for name, value in state.items())
    yield " | ".join(f"{name}: {value}" for name, value in parallel.items())
    yield f"precision: {manifest.plan['precision']['dtype']} | optimizer: {manifest.plan['optimizer']['name']}"
    yield " | ".join(f"{name}: {value}" for name, value in manifest.versions.items())
    yield f"files: {len(manifest.files)} | bytes: {sum(record.size for record in manifest.files)}"


def _tensors(folder: Path, manifest: Manifest, *, each: bool) -> Iterator[str]:
    from megatron.checkpoint.digest import read_any

    whole = read_any(folder, manifest)
    sizes = [parameter.weight.size for parameter in whole.parameters.values()]
    yield f"parameters: {len(sizes)} | numbers in them: {sum(sizes)}"
    if each:
        for name, parameter in whole.parameters.items():
            steps = "" if parameter.steps is None else f" | steps: {parameter.steps:g}"
            states = ", ".join(parameter.tensors)
            yield f"{name} {list(parameter.weight.shape)} | {states}{steps}"


if __name__ == "__main__":
    run_tool(main)
