"""torch.compile with a limit on recompilations per function, in every supported PyTorch."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch


def compile_function(
    function: Callable[..., Any], *, variants: int, **options: Any
) -> Callable[..., Any]:
    """Return `function`, compiled from its first call on.

    PyTorch before 2.13 has one limit for all functions of the process, and counts together what is
    compiled of the same function: there `variants` is added to it.

    Args:
        variants: how often it may be compiled, whatever else of this process is.
        options: of torch.compile.
    """
    known = signature(torch.compile).parameters
    if "isolate_recompiles" in known:
        options["isolate_recompiles"] = True
    if "recompile_limit" in known:
        options["recompile_limit"] = variants
    else:
        torch._dynamo.config.recompile_limit += variants
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled
