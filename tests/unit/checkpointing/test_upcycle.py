"""Upcycling keeps the function of a dense network, whatever activation, router and slices."""

import pytest
import torch
from checkpoints import random_weights, write_checkpoint
from problems import problem
from scripts import run_script
from tiny import tiny_argv, tiny_plan

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.conversion.upcycle import upcycle
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import ConfigError, WrongCheckpointError
from megatron.config.config import parse_config

SWIGLU = "--swiglu --disable-bias-linear --ffn-hidden-size 12"


def dense_checkpoint(folder, flags):
    weights = random_weights(tiny_plan(*flags.split()).model)
    return write_checkpoint(folder, weights, *flags.split())


def logits_of(folder, tokens_bs):
    manifest = read_manifest(folder)
    network = load_network(manifest.spec, read_checkpoint(folder, manifest, optimizer=False))
    positions = torch.arange(tokens_bs.size(1)).expand_as(tokens_bs)
    with torch.no_grad():
        return network({"tokens": tokens_bs, "positions": positions})


def experts_of(flags):
    return parse_config(tiny_argv(*flags.split()))[0].experts


@pytest.mark.parametrize(
    ("dense", "experts", "slices"),
    [
        ("", "--num-experts 4 --topk 2", 1),
        ("--swiglu --untie-embeddings-and-output-weights", "--num-experts 4 --topk 2", 2),
        (SWIGLU, "--num-experts 8 --topk 4 --expert-interval 1", 2),
        (SWIGLU, "--num-experts 12 --topk 6 --expert-interval 1 --moe-grouped-gemm", 3),
        ("--squared-relu", "--num-experts 4 --topk 4 --moe-router-score-function sigmoid", 4),
        (
            SWIGLU,
            "--num-experts 8 --topk 4 --moe-router-score-function sigmoid --expert-interval 1 "
            "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 "
            "--moe-router-num-groups 4 --moe-router-group-topk 2",
            2,
        ),
    ],
)
def test_the_function_is_the_same(tmp_path, dense, experts, slices):
    source = dense_checkpoint(tmp_path / "dense", dense)
    folder = upcycle(source, tmp_path / "experts", experts_of(experts), slices)
    spec = read_manifest(folder).spec
    assert spec.moe
    assert spec.moe.expert_ffn_hidden_size == spec.mlp.ffn_hidden_size // slices
    tokens_bs = torch.randint(spec.vocabulary.vocab_size, (3, spec.seq_length))
    torch.testing.assert_close(
        logits_of(folder, tokens_bs), logits_of(source, tokens_bs), rtol=1e-4, atol=2e-5
    )


def test_routers_divide_tokens_and_slices_differ(tmp_path):
    source = dense_checkpoint(tmp_path / "dense", SWIGLU)
    experts = experts_of("--num-experts 4 --topk 2 --expert-interval 1")
    folder = upcycle(source, tmp_path / "experts", experts, 2)
    weights = read_checkpoint(folder, read_manifest(folder), optimizer=False).parameters
    router = weights["3.mlp.router.weight"].weight.all()
    assert torch.equal(router[0::2], router[1::2])
    assert not torch.equal(router[0], router[2])
    first = weights["3.mlp.experts.dense_h_to_4h.weight"].weight.all()
    assert torch.equal(first[:2], first[2:])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(
    ("experts", "slices", "message"),
    [
        ("", 1, "--num-experts is required"),
        ("--num-experts 4", 1, "sum of 1 … --topk 2"),
        ("--num-experts 4 --topk 2 --moe-router-pre-softmax", 1, "sum of 1"),
        ("--num-experts 4 --topk 2", 5, "granularity 5 does not divide --ffn-hidden-size 32"),
        ("--num-experts 4 --topk 2", 4, "--topk: 2 is no multiple of … granularity 4"),
        ("--num-experts 6 --topk 4", 4, "--num-experts: 6 is no multiple"),
        ("--num-experts 4 --topk 8", 1, "--topk 8 is more than the 4 experts"),
        ("--num-experts 4 --topk 2 --mlp-type residual", 1, "residual"),
        (
            "--num-experts 4 --topk 2 --moe-ffn-hidden-size 8",
            1,
            "--moe-ffn-hidden-size 8 is not 32",
        ),
    ],
)
def test_experts_that_change_the_function_are_refused(tmp_path, experts, slices, message):
    source = dense_checkpoint(tmp_path / "dense", "")
    with problem(message, ConfigError):
        upcycle(source, tmp_path / "experts", experts_of(experts), slices)
    assert not (tmp_path / "experts").exists()


def test_only_a_dense_network_is_upcycled(tmp_path):
    source = dense_checkpoint(tmp_path / "dense", "--num-experts 2")
    experts = experts_of("--num-experts 4 --topk 2")
    with problem("has experts", WrongCheckpointError):
        upcycle(source, tmp_path / "experts", experts)


def test_the_tool_prints_the_flags_of_training(tmp_path):
    dense_checkpoint(tmp_path / "dense", "")
    save = tmp_path / "experts"
    flags = "--num-experts 4 --topk 2 --moe-upcycling-granularity 2"
    words = ["--load", str(tmp_path / "dense"), "--save", str(save), *flags.split()]
    ended = run_script("tools/checkpoint/upcycle.py", *words)
    assert f"--load {save} --use-checkpoint-args --finetune" in ended.stdout
    assert read_manifest(save / "global_step0").spec.moe
