"""torch.compile with a limit of its own, in a PyTorch that has the options for it and in one without."""

import pytest
import torch
from torch._dynamo.utils import counters

from megatron.fused_kernels.compilation import compile_function


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch.compiler.reset()


@pytest.fixture(params=["this PyTorch", "without options"])
def compiler(request, monkeypatch):
    if request.param == "this PyTorch":
        return
    compile_with = torch.compile

    def compile_without(function, *, fullgraph=False, dynamic=None, backend="inductor"):
        return compile_with(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_without)


def double(x):
    return 2 * x


@pytest.mark.usefixtures("compiler")
def test_each_compiled_function_has_its_own_variants():
    options = {"fullgraph": True, "dynamic": False, "backend": "eager"}
    for found in range(2):
        compiled = compile_function(double, variants=3, **options)
        for size in range(3 * found + 2, 3 * found + 5):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0))
    assert counters["stats"]["unique_graphs"] == 6
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for size in range(20, 24):
            compiled(torch.ones(size))
