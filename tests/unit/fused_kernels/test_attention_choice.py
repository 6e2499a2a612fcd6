"""Which attention runs, and what the table at the start of a run says about it."""

import pytest
import torch
from problems import problem
from tiny import tiny_plan
from torch.nn.attention import SDPBackend

from megatron.config.data.objective import ObjectiveName
from megatron.fused_kernels import attention_choice, flex_attention, registry
from megatron.fused_kernels.attention_choice import sdpa_backend
from megatron.fused_kernels.compilation import compile_function
from megatron.fused_kernels.flex_attention import compile_obstacle
from megatron.fused_kernels.trials import Trials, Workload
from megatron.training.setup import choose

WIDE = ("--bf16", "--kv-channels", "16", "--attention-dropout", "0")
NEED_DENSE_MASKS = {
    "documents": (["--reset-attention-mask"], "gpt"),
    "sliding windows": (["--window-size", "3"], "gpt"),
    "ALiBi": (["--position-embedding-type", "alibi"], "gpt"),
    "soft-capped": (["--attn-logit-softcapping", "30"], "gpt"),
    "padding": ([], "bert"),
    "relative positions": (["--position-embedding-type", "relative"], "t5"),
}


@pytest.fixture(autouse=True)
def triton_cannot(monkeypatch):
    """Return a function that gives a reason why Triton does not run; at first it does."""

    def have(obstacle):
        monkeypatch.setattr(registry, "_obstacle", lambda *_: obstacle)
        monkeypatch.setattr(Trials, "failure", lambda *_: None)

    have(None)
    return have


def attention(*flags, device="cuda", objective: ObjectiveName = "gpt"):
    more = {
        "bert": ("--tokenizer-type", "BertWordPieceLowerCase"),
        "t5": ("--decoder-seq-length", "4"),
    }.get(objective, ())
    plan = tiny_plan(*more, *flags, device=device, objective=objective)
    kernels, choices = choose(plan, torch.device(device))
    (line,) = (c for c in choices if c.operation == "attention")
    assert kernels.attention == line.implementation
    return line


@pytest.mark.parametrize("kind", NEED_DENSE_MASKS)
def test_gpus_take_block_masks_where_sdpa_would_need_dense_ones(kind):
    flags, objective = NEED_DENSE_MASKS[kind]
    line = attention(*WIDE, *flags, objective=objective)
    assert line.implementation == "flex"
    assert kind in line.why


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--attention-dropout", "0.1"], "--attention-dropout 0.1"),
        (["--kv-channels", "8"], "heads of 8 features"),
        (["--kernels", "reference"], "--kernels reference"),
    ],
)
def test_where_flex_attention_cannot_run_the_table_says_why(flags, why):
    line = attention(*WIDE, "--reset-attention-mask", *flags)
    assert line.implementation == "sdpa"
    assert why in line.why


def test_a_deterministic_run_keeps_relative_positions_from_flex_attention():
    flags, objective = NEED_DENSE_MASKS["relative positions"]
    torch.use_deterministic_algorithms(True)
    try:
        line = attention(*WIDE, *flags, objective=objective)
        assert (line.implementation, "not deterministic" in line.why) == ("sdpa", True)
        assert attention(*WIDE, "--reset-attention-mask").implementation == "flex"
        with problem("--attention-impl flex … not deterministic"):
            attention(*WIDE, "--attention-impl", "flex", *flags, objective=objective)
    finally:
        torch.use_deterministic_algorithms(False)


def test_flex_attention_without_triton_is_refused(triton_cannot):
    triton_cannot("no C compiler")
    with problem("--attention-impl flex … C compiler … leave it out"):
        attention(*WIDE, "--attention-impl", "flex")
    flags = ("--attention-impl", "flex", "--kernels", "reference")
    assert attention(*WIDE, *flags).implementation == "flex"


@pytest.fixture
def compiles_nothing(monkeypatch, gpus):
    """A GPU whose PyTorch cannot compile FlexAttention."""

    def compile_function(*_, **__):
        raise TypeError("unexpected keyword argument")

    def obstacle(head_dim, dtype, device, **form):
        return compile_obstacle(head_dim, dtype, torch.device("cpu"), **form)

    gpus(1)
    monkeypatch.setattr(flex_attention, "compile_function", compile_function)
    monkeypatch.setattr(flex_attention, "compile_obstacle", obstacle)
    monkeypatch.setattr(attention_choice, "sdpa_backend", lambda work: "memory-efficient")


@pytest.mark.usefixtures("compiles_nothing")
def test_what_cannot_be_compiled_falls_back_to_sdpa_and_says_why():
    line = attention(*WIDE, "--reset-attention-mask")
    assert line.implementation == "sdpa"
    assert f"torch {torch.__version__} cannot compile it: unexpected keyword" in line.why
    with problem("--attention-impl flex … torch … unexpected keyword"):
        attention(*WIDE, "--attention-impl", "flex")


def test_a_small_call_finds_out_what_cannot_be_compiled(monkeypatch):
    traced = []

    def compile_forward(function, **options):
        compiled = compile_function(function, backend="eager", **options)
        traced.append(function)
        # CPUs have no backward pass of FlexAttention.
        return lambda x: compiled(x.detach()) * x[..., :1]

    small = (16, torch.bfloat16, torch.device("cpu"))
    assert "cannot compile it: " in str(compile_obstacle(*small))
    monkeypatch.setattr(flex_attention, "compile_function", compile_forward)
    assert compile_obstacle(*small) is None
    assert compile_obstacle(*small, value_dim=8, has_sinks=True) is None
    assert len(traced) == 2


def test_a_flag_is_followed_unless_the_package_lacks_the_mask():
    masked = ("--reset-attention-mask",)
    assert attention(*WIDE, *masked, "--attention-impl", "sdpa").implementation == "sdpa"
    assert attention(*WIDE, "--attention-impl", "flash").implementation == "flash"
    assert attention(*WIDE, *masked, "--attention-impl", "flash").implementation == "flex"
    assert attention(*WIDE, "--attention-impl", "flex").implementation == "flex"
    assert attention(*WIDE).implementation == "sdpa"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--attention-dropout", "0"], "FlashAttention"),
        (["--attention-dropout", "0.1"], "math"),
        (["--attention-dropout", "0", "--window-size", "3"], "one dense mask for all layers"),
    ],
)
def test_cpus_name_the_kernel_that_pytorch_takes(flags, why):
    line = attention(*flags, device="cpu")
    assert line.implementation == "sdpa"
    assert why in line.why


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (SDPBackend.CUDNN_ATTENTION, "cuDNN"),
        (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient"),
    ],
)
def test_pytorch_chooses_for_the_shapes_of_the_run(backend, name):
    """Queries, grouped keys and a mask as layers pass them."""
    plan = tiny_plan("--group-query-attention", "--num-query-groups", "1", "--window-size", "3")
    work = Workload(
        spec=plan.model,
        dtype=torch.bfloat16,
        positions=18,
        tensor=1,
        device=torch.device("cpu"),
    ).of_attention()
    given = []

    def choice(query, key, value, mask, dropout, causal, *, scale, enable_gqa):
        assert query.requires_grad and query.dtype == torch.bfloat16
        given.append((query.shape, key.shape, mask.shape, dropout, causal, enable_gqa))
        return backend.value

    assert sdpa_backend(work, choose=choice).startswith(name)
    assert given == [((3, 2, 6, 4), (3, 1, 6, 4), (3, 2, 6, 6), 0.1, False, True)]


@pytest.mark.parametrize(
    ("flags", "device", "words"),
    [
        ([], "cpu", "--attention-impl flex … GPU"),
        (["--attention-dropout", "0.1"], "cuda", "flex … --attention-dropout 0 … 0.1"),
        (["--kv-channels", "8"], "cuda", "--attention-impl flex … 16 … 8"),
    ],
)
def test_flex_attention_that_cannot_run_is_refused(flags, device, words):
    with problem(words):
        tiny_plan(*WIDE, "--attention-impl", "flex", *flags, device=device)
