"""FP8 products of linear layers: what is refused, where they run, and their values (with torchao)."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compiled_networks import TRACED
from networks import gpt_steps
from problems import problem, require_problem
from tiny import batch_of, tiny_config, tiny_plan, tiny_spec
from torch.testing import assert_close

from megatron.common.errors import ConfigError
from megatron.fused_kernels import float8, registry
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.fused_kernels.registry import choose_kernels, package_problems
from megatron.fused_kernels.trials import Workload
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.rng import OrdinaryStream

GPU = torch.device("cuda")
SIZES = ["--hidden-size", "32", "--num-attention-heads", "2"]
FP8 = [*SIZES, "--bf16", "--fp8-format", "hybrid"]


@pytest.mark.parametrize(
    ("flags", "device", "why"),
    [
        (FP8, "cpu", "--fp8-format hybrid needs a GPU"),
        ([*SIZES, "--fp8-format", "e4m3"], "cuda", "write --bf16"),
        ([*SIZES, "--fp16", "--fp8-format", "e4m3"], "cuda", "write --bf16"),
        ([*FP8, "--fp8-recipe", "rowwise"], "cuda", "write --fp8-format e4m3"),
        (["--fp8-recipe", "rowwise"], "cuda", "write --fp8-format too"),
        ([*FP8, "--zero-stage", "3"], "cuda", "write --zero-stage 2"),
        ([*FP8, "--num-experts", "2"], "cuda", "not for experts"),
        (
            ["--bf16", "--fp8-format", "hybrid", "--hidden-size", "24"],
            "cuda",
            "--hidden-size .* 24",
        ),
        ([*FP8, "--ffn-hidden-size", "40"], "cuda", "--ffn-hidden-size .* 40"),
        (["--fp8-hybrid"], "cuda", "--fp8-format hybrid"),
    ],
)
def test_what_cannot_be_computed_in_fp8_is_refused(flags, device, why, capsys):
    with pytest.raises((ConfigError, SystemExit)) as refused:
        tiny_plan(*flags, device=device)
    message = str(refused.value) + capsys.readouterr().err
    assert re.search(why, message), message


def test_a_single_expert_is_an_ordinary_mlp():
    decided = tiny_plan(*FP8, "--num-experts", "1", device="cuda")
    assert decided.kernels.fp8_format == "hybrid" and not decided.model.moe


def test_without_a_compiler_a_notice_says_why_fp8_is_slow():
    def notices(*flags):
        return [x for x in tiny_plan(*flags, device="cuda").notices if "--fp8-format" in x]

    (notice,) = notices(*FP8)
    assert "kernels of their own" in notice and "add --compile" in notice
    assert not notices(*FP8, "--compile") and not notices(*SIZES, "--bf16")


def test_torchao_must_be_installed(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    require_problem("--fp8-format … torchao", [*package_problems(tiny_config(*FP8))])


@pytest.mark.parametrize(("capability", "works"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_old_gpus_are_refused_and_others_compute_in_fp8(monkeypatch, capability, works):
    plan = tiny_plan(*FP8, "--kernels", "reference", device="cuda")
    work = Workload(spec=plan.model, dtype=torch.bfloat16, positions=12, tensor=1, device=GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(float8, "fp8_linear", lambda *arguments: arguments)
    with contextlib.nullcontext() if works else problem("--fp8-format hybrid … 8.9 … 8.0"):
        kernels, choices = choose_kernels(plan.kernels, work)
        assert kernels.linear == ("hybrid", "tensorwise")
        assert "linear layers" in [choice.operation for choice in choices]


def test_without_the_flag_products_are_torch_s():
    plan = tiny_plan("--kernels", "reference", device="cuda")
    work = Workload(spec=plan.model, dtype=torch.float32, positions=12, tensor=1, device=GPU)
    assert choose_kernels(plan.kernels, work)[0].linear is None


def model_of(group, linear):
    spec = tiny_spec(num_layers=2, hidden_size=32, head_dim=16, num_attention_heads=2)
    steps = gpt_steps(
        spec,
        group=group,
        rng=OrdinaryStream(),
        mixed=False,
        kernels=replace(REFERENCE, linear=linear),
    )
    model = SequentialModel(steps)
    initialise(model, seed=1, std=0.1, num_layers=2)
    return model


def test_attention_and_mlp_call_it_and_the_head_does_not(group):
    weights = []

    def linear(x, weight):
        weights.append(weight)
        return F.linear(x, weight)

    tokens = torch.randint(11, (2, 6))
    batch = batch_of(tokens, torch.arange(6).expand(2, 6).contiguous())
    model = model_of(group, linear)
    assert torch.equal(model(batch), model_of(group, None)(batch))
    named = dict(model.named_parameters())
    expected = [
        f"{layer}.{name}.weight"
        for layer in (3, 4)
        for name in (
            "self_attention.query_key_value",
            "self_attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        )
    ]
    assert [id(x) for x in weights] == [id(named[name]) for name in expected]


def products(linear):
    """Return y, and the gradients of x and the weight, of 15 tokens: no multiple of 16."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(48, 32)).bfloat16().requires_grad_()
    y = linear(x, weight)
    return [y, *torch.autograd.grad(y, (x, weight), torch.randn(5, 3, 48).bfloat16())]


def errors_of(*form):
    emulated = products(float8.fp8_linear(*form, emulate=True))
    exact = products(F.linear)
    assert [x.dtype for x in emulated] == [torch.bfloat16] * 3
    return [
        float((x - y).detach().norm() / y.detach().norm())
        for x, y in zip(emulated, exact, strict=True)
    ]


def test_products_are_those_of_bfloat16_but_for_rounding():
    """e4m3 has 3 bits behind the point, and e5m2 has 2."""
    pytest.importorskip("torchao")
    hybrid, e4m3, rowwise = (
        errors_of(*form)
        for form in (("hybrid", "tensorwise"), ("e4m3", "tensorwise"), ("e4m3", "rowwise"))
    )
    for errors in (hybrid, e4m3, rowwise):
        assert min(errors) > 0.01
        assert max(errors) < 0.08
    assert hybrid[0] == e4m3[0] != rowwise[0]
    assert hybrid[1] > 1.2 * e4m3[1]
    assert hybrid[2] > 1.2 * e4m3[2]


def test_a_network_computes_in_fp8(group):
    pytest.importorskip("torchao")
    tokens = torch.randint(11, (2, 6))
    batch = batch_of(tokens, torch.arange(6).expand(2, 6).contiguous())
    linear = float8.fp8_linear("hybrid", "tensorwise", emulate=True)
    logits, exact = (model_of(group, kind).bfloat16()(batch) for kind in (linear, None))
    logits.float().square().sum().backward()
    assert not torch.equal(logits, exact)
    assert float((logits - exact).detach().norm() / exact.detach().norm()) < 0.1


def test_a_compiled_layer_computes_in_fp8(group):
    pytest.importorskip("torchao")
    tokens = torch.randint(11, (2, 6))
    batch = batch_of(tokens, torch.arange(6).expand(2, 6).contiguous())
    linear = float8.fp8_linear("hybrid", "tensorwise", emulate=True)
    model, plain = (model_of(group, linear).bfloat16() for _ in range(2))
    torch.compiler.reset()
    TRACED.compile_blocks(model)
    found, expected = model(batch), plain(batch)
    assert torch.equal(found, expected)
    for logits in (found, expected):
        logits.float().square().sum().backward()
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, right.grad)
