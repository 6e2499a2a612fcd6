"""Memory traffic of a layer on a GPU, counted without one.

Two networks of 2 and of 4 layers run forward and backward on meta tensors with the Triton kernels.
An operation, or a kernel's launch, counts the bytes of the tensors that it reads and writes, each
once; views and allocations count none. Half the difference is a layer's, in units of one pass over
the activations [s, b, h]. Matrix products and attention are listed, but not part of the sum.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from golden_files import require_golden
from networks import gpt_steps
from tiny import Shards, tiny_plan, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.model.layers import experts
from megatron.model.layers.experts import MixtureOfExperts
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel import grouped_linear
from megatron.tensor_parallel.rng import OrdinaryStream

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from megatron.fused_kernels.triton.all import TRITON

SAMPLES, POSITIONS, WIDTH = 8, 2048, 1024
SIZES = {
    "hidden_size": WIDTH,
    "ffn_hidden_size": 4 * WIDTH,
    "num_attention_heads": 16,
    "head_dim": WIDTH // 16,
    "seq_length": POSITIONS,
    "max_position_embeddings": POSITIONS,
}
NETWORKS = {
    "GPT": {},
    "Llama": {
        "position_embedding": "rotary",
        "rotary_dim": WIDTH // 16,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "linear_bias": False,
        "qkv_bias": False,
    },
    "GPT with 8 experts, 2 for each token": {"experts_per_token": 2, "router_normalises": True},
}
ROUTING = tiny_plan("--num-experts", "8", "--topk", "2").experts
FREE = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.detach", "aten._unsafe_view")
APART = ("aten.mm", "aten.addmm", "aten.bmm", "aten._grouped_mm", "attention")


def tensors(*values):
    return [each for each in tree_leaves(values) if torch.is_tensor(each)]


@dataclass
class Traffic(TorchDispatchMode):
    """Bytes and calls of operations by name."""

    bytes: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)

    def __post_init__(self):
        super().__init__()

    def __hash__(self):
        return id(self)

    def add(self, name, *values):
        different = {id(each): each for each in tensors(*values)}
        self.bytes[name] += sum(each.numel() * each.element_size() for each in different.values())
        self.calls[name] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function.overloadpacket)
        costs = tensors(result) and not function.is_view and name not in FREE
        if costs:
            self.add(name, args, kwargs, result)
        return result


@pytest.fixture
def traffic(monkeypatch):
    """Return what counts; kernels and attention do nothing but count."""
    found = Traffic()

    def launch(kernel, *args, grid, warmup, **keywords):
        file = kernel.fn.__module__.rpartition(".")[2]
        found.add(f"triton.{file}.{kernel.fn.__name__.strip('_')}", args, keywords)

    class Attention(torch.autograd.Function):
        """Reads and writes as flash attention does, in the layouts of its arguments."""

        @staticmethod
        def forward(ctx, query, key, value):
            mixed = torch.empty_like(query)
            ctx.save_for_backward(query, key, value, mixed)
            found.add("attention", query, key, value, mixed)
            return mixed

        @staticmethod
        def backward(ctx, grad):
            grads = [torch.empty_like(each) for each in ctx.saved_tensors[:3]]
            found.add("attention", ctx.saved_tensors, grad, grads)
            return tuple(grads)

    monkeypatch.setattr(JITFunction, "run", launch)
    for module in (grouped_linear, experts):
        monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, key, value, **_: Attention.apply(query, key, value),
    )
    return found


def count(traffic, num_layers, **changes):
    """Return bytes and calls of one forward and backward pass."""
    traffic.bytes.clear()
    traffic.calls.clear()
    if "experts_per_token" in changes:
        changes["num_experts"] = (8,) * num_layers
    spec = tiny_spec(num_layers=num_layers, **SIZES, **changes)
    parts = {"group": Shards(0, 1), "rng": OrdinaryStream(), "mixed": True, "kernels": TRITON}
    parts["build_mixture"] = partial(MixtureOfExperts, plan=ROUTING)
    with torch.device("meta"):
        steps = gpt_steps(spec, **parts)
        model = SequentialModel(steps, links=True).bfloat16()
        tokens = torch.zeros(SAMPLES, POSITIONS, dtype=torch.int64)
        with traffic:
            model({"tokens": tokens, "positions": tokens}).sum().backward()
    return traffic.bytes.copy(), traffic.calls.copy()


def test_traffic_of_a_layer(traffic):
    lines = []
    for name, changes in NETWORKS.items():
        small, few = count(traffic, 2, **changes)
        large, many = count(traffic, 4, **changes)
        unit = 2 * SAMPLES * POSITIONS * WIDTH
        units = {each: (large[each] - small[each]) / 2 / unit for each in large}
        calls = {each: (many[each] - few[each]) / 2 for each in many}
        rows = sorted(each for each in units if calls[each])
        total = math.fsum(units[each] for each in rows if each not in APART)
        lines += [f"[{name}]", f"sum | {total:.1f} units | {sum(calls.values()):.0f} kernels"]
        lines += [f"{each} | {units[each]:.2f} | {calls[each]:g}" for each in rows]
    require_golden("traffic.txt", "\n".join(lines) + "\n")
