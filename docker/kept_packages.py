#!/usr/bin/env python
"""Print pip constraints that keep the installed torch and the packages compiled for it."""

from importlib.metadata import distributions

COMPILED_FOR_TORCH = {
    *("torch", "torchvision", "torchaudio", "torchao", "triton", "pytorch-triton"),
    *("apex", "flash-attn", "transformer-engine"),
}


def main() -> None:
    """Print a line NAME==VERSION for each of them that is installed."""
    installed = {found.name.lower().replace("_", "-"): found.version for found in distributions()}
    kept = sorted(COMPILED_FOR_TORCH & installed.keys())
    print(*(f"{name}=={installed[name]}" for name in kept), sep="\n")


if __name__ == "__main__":
    main()
