"""The table of implementations: what it says, and what turns its lines."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import pytest
import torch
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.common.errors import ConfigError
from megatron.fused_kernels import registry as choose
from megatron.fused_kernels import trials
from megatron.fused_kernels.reference.cross_entropy import COMPILED
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.fused_kernels.registry import (
    choose_inference_kernels,
    choose_kernels,
    package_problems,
)
from megatron.fused_kernels.trials import Trials, Workload

REPOSITORY = Path(__file__).resolve().parents[3]
GPU, CPU = torch.device("cuda"), torch.device("cpu")
FUSED = {
    "--no-masked-softmax-fusion": "softmax",
    "--no-layer-norm-fusion": "norm",
    "--no-bias-gelu-fusion": "activation",
    "--no-bias-dropout-fusion": "bias, dropout, residual",
    "--no-rope-fusion": "rotary positions",
    "--no-cross-entropy-fusion": "cross-entropy",
}
ALL_OPERATIONS = ["--attention-impl", "fused-softmax", "--position-embedding-type", "rotary"]


def works(work, operation):
    """Every kernel can be launched."""


def no_compiler(work, operation):
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")


def alone(reason):
    return reason


def chosen(*flags, device=GPU, launch=works, agree=alone, **work):
    plan = tiny_plan(*flags, device=device.type)
    sizes = {"dtype": torch.bfloat16, "positions": 12, "tensor": 1} | work
    return choose_kernels(
        plan.kernels,
        Workload(spec=plan.model, device=device, **sizes),
        trials=Trials(launch=launch, agree=agree),
    )


def table(*flags, **keywords):
    return {c.operation: c.implementation for c in chosen(*flags, **keywords)[1]}


@pytest.fixture
def packages(monkeypatch, modules):
    """Return the packages that seem to be installed, to add to."""
    installed = {"triton"}
    for module in (choose, trials):
        monkeypatch.setattr(module, "find_spec", lambda name: name in installed)
    # The kernels themselves are not looked at here, and Triton may really be absent.
    fused = {"activation_adds_bias": True, "add_norm": Mock(), "bias_dropout_add": Mock()}
    fused["decode_attention"] = Mock()
    modules("megatron.fused_kernels.triton.all", TRITON=replace(REFERENCE, **fused))
    return installed


def test_a_gpu_with_triton_fuses_everything(packages):
    assert table(*ALL_OPERATIONS) == {"attention": "fused-softmax"} | dict.fromkeys(
        FUSED.values(), "Triton"
    )


@pytest.mark.parametrize(("flag", "operation"), FUSED.items())
def test_a_flag_turns_its_line_and_no_other(packages, flag, operation):
    kernels, choices = chosen(*ALL_OPERATIONS, flag)
    assert [c.operation for c in choices if c.implementation == "PyTorch"] == [operation]
    (line,) = (c for c in choices if c.operation == operation)
    assert str(line) == f" > {operation}: PyTorch ({flag})"
    assert kernels.activation_adds_bias == (operation != "activation")


def test_operations_that_the_network_does_not_have_have_no_line(packages):
    assert "softmax" not in table()
    assert "rotary positions" not in table()
    assert "activation" not in table("--squared-relu")
    assert not chosen("--squared-relu")[0].activation_adds_bias


@pytest.mark.parametrize(
    ("flags", "work", "why"),
    [
        ([], {"device": CPU}, "Triton needs a GPU"),
        ([], {"dtype": torch.float64}, "too few for float64"),
        (["--hidden-size", "65536"], {}, "65536 features a row"),
        (["--attention-impl", "fused-softmax", "--seq-length", "20000"], {}, "20000 keys a row"),
        ([], {"positions": 2**29}, "4294967296 elements"),
        (
            ["--position-embedding-type", "rotary", "--kv-channels", "32768"],
            {},
            "2 heads of 32768 features",
        ),
    ],
)
def test_an_unmet_constraint_is_told_or_refused(packages, flags, work, why):
    assert any(why in str(choice) and choice.unmet for choice in chosen(*flags, **work)[1])
    with problem(f"--abort-on-unmet-fused-kernel-constraints … {why}"):
        chosen(*flags, "--abort-on-unmet-fused-kernel-constraints", **work)


def test_all_unmet_constraints_are_listed_at_once_and_may_be_turned_off():
    flag = "--abort-on-unmet-fused-kernel-constraints"
    with pytest.raises(ConfigError) as error:
        chosen(flag, device=CPU)
    assert len(error.value.problems) == 4
    off = [other for other in FUSED if FUSED[other] in table(device=CPU)]
    assert chosen(flag, *off, device=CPU)[0].bias_gelu is REFERENCE.bias_gelu


def test_without_triton_the_reference_stands_in(packages):
    packages.clear()
    assert "the package triton is not installed" in str(chosen(launch=trials._launch)[1][1])


def test_where_no_kernel_can_be_launched_the_reference_stands_in_and_the_reason_is_printed(
    packages,
):
    kernels, (_, *choices) = chosen(launch=no_compiler)
    assert kernels.layer_norm is REFERENCE.layer_norm
    assert kernels.cross_entropy is REFERENCE.cross_entropy
    for choice in choices:
        assert choice.unmet
        assert str(choice).endswith(
            "PyTorch (Triton's first kernel failed: Failed to find C compiler.)"
        )
    (bare,) = {c.why for c in chosen(launch=Mock(side_effect=OSError))[1][1:]}
    assert bare.endswith("failed: OSError")


def test_where_no_kernel_can_be_launched_triton_by_name_is_refused(packages):
    with problem("--kernels triton … C compiler"):
        chosen("--kernels", "triton", launch=no_compiler)


def test_nothing_is_launched_where_triton_is_not_wanted(packages):
    launch = Mock()
    chosen("--kernels", "reference", launch=launch)
    chosen(device=CPU, launch=launch)
    launch.assert_not_called()
    chosen("--no-layer-norm-fusion", launch=launch)
    tried = [operation for _, operation in (call.args for call in launch.call_args_list)]
    others = ["activation", "bias, dropout, residual", "queries, keys, values", "cross-entropy"]
    assert tried == [None, *others]


def test_a_kernel_that_fails_leaves_its_operation_to_the_reference(packages, caplog):
    def launch(work, operation):
        if operation in ("norm", "attention of decode steps"):
            raise RuntimeError("\n  PassManager::run failed\nmore")

    kernels, choices = chosen(launch=launch)
    (line,) = (choice for choice in choices if choice.operation == "norm")
    assert line.unmet and line.why == "its kernel failed: PassManager::run failed"
    assert kernels.layer_norm is REFERENCE.layer_norm and kernels.activation_adds_bias
    with problem("--kernels triton … norm … PassManager::run failed … --no-layer-norm-fusion"):
        chosen("--kernels", "triton", launch=launch)
    kernels = generation_kernels(launch=launch)
    assert kernels.decode_attention is None and kernels.activation_adds_bias
    message = "attention of decode steps: its kernel failed: PassManager::run failed; --kernels ref"
    assert message in caplog.text


def test_a_kernel_that_breaks_the_gpu_is_named_with_its_flag(packages):
    broken = []

    def launch(work, operation):
        if operation == "attention of decode steps":
            broken.append(operation)
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with problem("attention of decode steps failed … illegal memory access … --kernels reference"):
        generation_kernels(launch=launch)


class World:
    """Ranks that choose at once; `outcomes` are their results, or errors."""

    def __init__(self, launches, choose):
        self._barrier, self._reasons = Barrier(len(launches), timeout=30), {}
        with ThreadPoolExecutor(len(launches)) as threads:
            calls = [
                threads.submit(choose, launch=launch, agree=partial(self._agree, rank))
                for rank, launch in enumerate(launches)
            ]
        self.outcomes = [call.exception() or call.result() for call in calls]

    def _agree(self, rank, reason):
        self._barrier.wait()
        self._reasons[rank] = reason
        self._barrier.wait()
        return next(
            (f"on rank {r}: {why}" for r, why in sorted(self._reasons.items()) if why), None
        )


def fails_in(*operations):
    def launch(work, operation):
        if operation in operations:
            raise OSError("No space left on device")

    return launch


def test_a_kernel_that_fails_on_one_rank_is_used_by_none(packages, caplog):
    launches = [works, fails_in("bias, dropout, residual"), fails_in("norm")]
    first, *others = World(launches, chosen).outcomes
    for kernels, choices in (first, *others):
        unmet = {c.operation: c.why for c in choices if c.unmet}
        assert unmet == {
            "bias, dropout, residual": "its kernel failed: on rank 1: No space left on device",
            "norm": "its kernel failed: on rank 2: No space left on device",
        }
        assert kernels.bias_dropout_add is REFERENCE.bias_dropout_add
        assert kernels.activation_adds_bias
    for kernels in World(
        [works, fails_in("attention of decode steps")], generation_kernels
    ).outcomes:
        assert kernels.decode_attention is None and kernels.activation_adds_bias
    assert caplog.text.count("decode steps: its kernel failed: on rank 1: No space") == 2


def test_a_rank_without_triton_or_with_required_kernels_that_fail_ends_alike_on_all(packages):
    for outcome in World([works, fails_in(None)], chosen).outcomes:
        assert all("failed: on rank 1: No space" in choice.why for choice in outcome[1][1:])
    required = partial(chosen, "--kernels", "triton")
    for error in World([works, fails_in("norm")], required).outcomes:
        assert isinstance(error, ConfigError)
        assert "--kernels triton: the kernel for norm failed: on rank 1" in str(error)


def test_memory_that_does_not_suffice_for_a_kernel_is_no_fault_of_the_kernel(packages):
    with pytest.raises(torch.OutOfMemoryError):
        chosen(launch=Mock(side_effect=[None, torch.OutOfMemoryError]))


@pytest.mark.parametrize("flag", ["--no-layer-norm-fusion", "--no-bias-dropout-fusion"])
def test_the_sum_and_its_norm_are_fused_where_both_operations_are(packages, flag):
    assert chosen()[0].add_norm
    assert chosen(flag)[0].add_norm is None
    assert chosen("--kernels", "apex")[0].add_norm is None


def test_the_reference_everywhere_is_no_problem(packages):
    flags = ["--kernels", "reference", "--abort-on-unmet-fused-kernel-constraints"]
    kernels, choices = chosen(*flags)
    assert {c.implementation for c in choices} == {"sdpa", "PyTorch"}
    assert kernels.layer_norm is REFERENCE.layer_norm


def test_apex_has_the_norms_and_triton_the_rest(packages):
    assert table("--kernels", "apex") == {
        "attention": "sdpa",
        "norm": "apex",
        "activation": "Triton",
        "bias, dropout, residual": "Triton",
        "queries, keys, values": "Triton",
        "cross-entropy": "Triton",
    }


def test_compiled_layers_take_the_reference_and_the_loss_stays_triton_s(
    packages, monkeypatch, tmp_path
):
    flags = (*ALL_OPERATIONS, "--compile")
    kernels, choices = chosen(*flags)
    found = {c.operation: c.implementation for c in choices}
    assert {found.pop("attention"), found.pop("cross-entropy")} == {"fused-softmax", "Triton"}
    assert {*found.values()} == {"compiled"}
    assert " > norm: compiled (--compile)" in map(str, choices)
    assert kernels.layer_norm is REFERENCE.layer_norm
    assert not tiny_plan("--compile").kernels.chooses_attention
    assert table("--compile", "--no-cross-entropy-fusion")["cross-entropy"] == "compiled"

    (tmp_path / "g++").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert table("--compile", device=CPU)["cross-entropy"] == "compiled"
    assert chosen("--compile", device=CPU)[0].cross_entropy is COMPILED
    chunks = ("--loss-chunk-tokens", "4")
    assert table("--compile", *chunks, device=CPU)["cross-entropy"] == "PyTorch"


def test_compilation_without_a_compiler_is_refused(packages, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with problem("--compile: … C++ compiler"):
        chosen("--compile", device=CPU)
    packages.clear()
    with problem("--compile: … triton is not installed"):
        chosen("--compile", launch=trials._launch)


def test_scores_are_raised_to_32_bits_when_asked_or_scaled_by_layer():
    scores = torch.randn(1, 1, 300, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = scores.double().mul(0.3).masked_fill(torch.ones(300, 300).triu(1) > 0, -torch.inf)
    exact = exact.softmax(-1)

    def error(*flags):
        softmax = chosen(*flags, device=CPU)[0].scaled_causal_softmax
        return float((softmax(scores, 0.3).double() - exact).abs().mean())

    by_layer = error()
    requested = error("--no-query-key-layer-scaling", "--attention-softmax-in-fp32")
    neither = error("--no-query-key-layer-scaling")
    assert by_layer == requested < neither


@pytest.mark.parametrize(
    ("flags", "package"),
    [
        (["--kernels", "triton"], "triton"),
        (["--kernels", "apex"], "apex"),
        (["--attention-impl", "flash"], "flash_attn"),
        (["--use-flash-attn-v2"], "flash_attn"),
    ],
)
def test_a_package_asked_for_by_name_has_to_be_there(packages, flags, package):
    config = tiny_config(*flags)
    packages.clear()
    (problem,) = package_problems(config)
    assert f"package {package} " in problem
    packages.add(package)
    assert [*package_problems(config)] == []


def test_flash_attention_that_cannot_soft_cap_is_refused(packages, monkeypatch, tmp_path):
    def install(version):
        folder = tmp_path / version / f"flash_attn-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: flash_attn\nVersion: {version}\n")
        monkeypatch.syspath_prepend(folder.parent)

    packages.add("flash_attn")
    capped = tiny_config("--use-flash-attn", "--attn-logit-softcapping", "50")
    install("2.5.9.post1")
    (problem,) = package_problems(capped)
    assert "flash_attn 2.5.9.post1" in problem
    assert [*package_problems(tiny_config("--use-flash-attn"))] == []
    install("2.10.0")
    assert [*package_problems(capped)] == []


def test_soft_capped_scores_are_written_out_and_their_softmax_fused(packages):
    assert "softmax" not in table()
    found = table("--attn-logit-softcapping", "50")
    assert (found["attention"], found["softmax"]) == ("fused-softmax", "Triton")


@pytest.mark.parametrize(
    ("flags", "device", "words"),
    [
        (["--kernels", "triton"], "cpu", "--kernels triton … GPU"),
        (["--use-flash-attn", "--bf16"], "cpu", "--use-flash-attn … GPU"),
        (["--attention-impl", "flash"], "cuda", "--attention-impl flash … --bf16"),
        (["--use-flash-attn", "--bf16", "--kv-channels", "264"], "cuda", "256 … 264"),
        (
            ["--use-flash-attn", "--attention-impl", "sdpa", "--bf16"],
            "cuda",
            "--use-flash-attn … --attention-impl sdpa",
        ),
        (
            ["--attention-impl", "sdpa", "--attn-logit-softcapping", "50"],
            "cpu",
            "--attention-impl sdpa … --attn-logit-softcapping",
        ),
        (["--compile-mode", "default"], "cpu", "--compile-mode default … --compile"),
        (["--compile", "--kernels", "triton"], "cuda", "--compile … --kernels triton"),
        (["--compile", "--use-flash-attn", "--bf16"], "cuda", "--compile … flash … sdpa"),
        (["--compile", "--attention-impl", "flex"], "cuda", "--compile … flex … sdpa"),
        (["--compile", "--recompute-activations"], "cuda", "--recompute-granularity full"),
        (["--compile", "--zero-stage", "3"], "cpu", "--compile … --zero-stage 2"),
        (
            ["--compile", "--num-experts", "2", "--expert-interval", "1"],
            "cpu",
            "--compile … --num-experts",
        ),
        (
            ["--compile", "--compile-mode", "reduce-overhead"],
            "cpu",
            "--compile-mode reduce-overhead … GPU",
        ),
        (
            ["--compile", "--compile-mode", "reduce-overhead", "--checkpoint-activations"],
            "cuda",
            "--compile-mode reduce-overhead … full recomputation",
        ),
    ],
)
def test_kernels_that_cannot_run_are_refused(flags, device, words):
    with problem(words):
        tiny_plan(*flags, device=device)


def test_compiled_layers_have_one_rng_state_and_one_length(tmp_path):
    ranks = ["--compile", "--tensor-model-parallel-size", "2"]
    with problem("--attention-dropout 0.1 … --attention-dropout 0 … --compile"):
        tiny_plan(*ranks, world_size=2)
    with problem("--lora-dropout 0.1 … --lora-dropout 0 … --compile"):
        lora = ("--attention-dropout", "0", "--lora-rank", "2", "--lora-dropout", "0.1")
        tiny_plan(*ranks, *lora, world_size=2)
    assert tiny_plan(*ranks, "--attention-dropout", "0", world_size=2).kernels.compile == "default"

    stages = ("--pipeline-model-parallel-size", "2", "--compile-mode", "reduce-overhead")
    with problem("--compile-mode reduce-overhead … pipeline stages"):
        tiny_plan("--compile", *stages, world_size=2, device="cuda")

    growing = tmp_path / "ds.json"
    growing.write_text(json.dumps({"curriculum_learning": {"enabled": True}}))
    with problem("--compile … curriculum_learning"):
        tiny_plan("--compile", "--deepspeed", "--deepspeed_config", str(growing))


def test_flash_attention_is_planned_where_it_can_run():
    for flags in (["--use-flash-attn"], ["--attention-impl", "flash"]):
        for more in ([], ["--attn-logit-softcapping", "50"]):
            planned = tiny_plan(*flags, *more, "--bf16", device="cuda").kernels
            assert planned.attention == "flash"
    assert tiny_plan().kernels.attention == "sdpa"


def test_apex_norms_get_what_apex_wants(modules):
    given = []

    def fused_layer_norm_affine(x, weight, bias, shape, eps):
        given.append("layer")
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    def fused_rms_norm_affine(x, weight, shape, eps):
        given.append("rms")
        return torch.nn.functional.rms_norm(x, shape, weight, eps)

    modules(
        "apex.normalization.fused_layer_norm",
        fused_layer_norm_affine=fused_layer_norm_affine,
        fused_rms_norm_affine=fused_rms_norm_affine,
    )
    kernels, _ = chosen("--kernels", "apex", "--no-layer-norm-fusion")
    assert kernels.layer_norm is REFERENCE.layer_norm
    packed = choose.apex_norms
    x, weight, bias = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    assert torch.equal(
        packed.layer_norm(x, weight, bias, 1e-3), REFERENCE.layer_norm(x, weight, bias, 1e-3)
    )
    assert torch.equal(
        packed.layer_norm(x, weight, None, 1e-3), REFERENCE.layer_norm(x, weight, None, 1e-3)
    )
    assert torch.equal(packed.rms_norm(x, weight, 1e-3), REFERENCE.rms_norm(x, weight, 1e-3))
    assert given == ["layer", "layer", "rms"]


def test_no_optional_package_is_imported_before_it_is_used():
    """A run on a CPU starts, and trains a step, where none of them can be imported."""
    code = (
        "import sys\n"
        "for name in ('triton', 'flash_attn', 'apex'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from tiny import tiny_plan\n"
        "from networks import gpt_steps\n"
        "from megatron.model.layers.layer_list import SequentialModel\n"
        "from megatron.tensor_parallel.process_groups import lone_group\n"
        "from megatron.tensor_parallel.rng import OrdinaryStream\n"
        "from megatron.training import setup\n"
        "plan = tiny_plan('--attention-impl', 'fused-softmax')\n"
        "kernels, _ = setup.choose(plan, torch.device('cpu'))\n"
        "steps = gpt_steps(plan.model, group=lone_group(), rng=OrdinaryStream(), mixed=False,\n"
        "                   kernels=kernels)\n"
        "tokens = torch.zeros(1, 6, dtype=torch.int64)\n"
        "SequentialModel(steps)({'tokens': tokens, 'positions': tokens}).sum().backward()\n"
    )
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def generation_kernels(*flags, device=GPU, launch=works, agree=alone):
    plan = tiny_plan(*flags)
    sizes = {"tensor": 1, "dtype": torch.bfloat16, "device": device}
    return choose_inference_kernels(
        plan.kernels, plan.model, trials=Trials(launch=launch, agree=agree), **sizes
    )


def test_generation_fuses_what_flags_and_kernels_permit(packages, caplog):
    kernels = generation_kernels()
    assert kernels.decode_attention and kernels.add_norm and kernels.attention == "sdpa"
    assert not caplog.text
    assert generation_kernels("--no-bias-dropout-fusion").add_norm is None
    wide = generation_kernels("--kv-channels", "512")
    assert wide.decode_attention is None and wide.add_norm
    assert "attention of decode steps: 1 queries of 512 features" in caplog.text


def test_generation_without_kernels_runs_references(packages, caplog):
    assert generation_kernels(device=CPU) is REFERENCE
    assert generation_kernels("--kernels", "reference") is REFERENCE
    assert not caplog.text
    kernels = generation_kernels(launch=no_compiler)
    assert kernels.decode_attention is None and kernels.bias_gelu is REFERENCE.bias_gelu
    assert "fused kernel for norm: Triton's first kernel failed: Failed to find C" in caplog.text
