"""Checkpoints written for Megatron-LM and read back keep the gates of MLPs, and the progress."""

import pytest
import torch
from checkpoints import random_weights, whole_weights, write_checkpoint
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.megatron_lm.convert import Conversion, convert
from megatron.checkpointing.megatron_lm.foreign_checkpoint import progress_of
from megatron.checkpointing.train_state import TrainState
from megatron.config.config import Config

VOCAB = 100


def converted(source, output, **how):
    """Convert a checkpoint; return its folder."""
    needed = {"micro_batch_size": 1, "lr": 1, "train_iters": 1, "data_path": ["none"]}
    needed |= {"true_vocab_size": VOCAB}
    conversion = Conversion(source=source, output=output, flags=("--t", "--p"), **how)
    list(convert(conversion, lambda found: Config.of(**{**found, **needed})))
    return output / "global_step3"


@pytest.mark.parametrize("experts", [(), ("--num-experts", "4", "--topk", "2")])
@pytest.mark.parametrize(
    "activation",
    ["--swiglu", *(f"--glu-activation {name}" for name in ("geglu", "liglu", "reglu"))],
)
def test_gates_and_progress_come_back(group, tmp_path, activation, experts):
    flags = (*activation.split(), *experts)
    weights = random_weights(tiny_plan(*flags, vocab_size=VOCAB).model)
    write_checkpoint(tmp_path / "own", weights, *flags, vocab_size=VOCAB)
    how = {"distributed": True} if experts else {"tensor": 2}
    converted(tmp_path / "own", tmp_path / "theirs", saver="megatron", **how)
    back = converted(tmp_path / "theirs", tmp_path / "back", saver="own")
    assert read_manifest(back).state == TrainState(iteration=3, samples=6, tokens=36)
    found = whole_weights(back, read_manifest(back))
    gated = [name for name in weights if ".dense_h_to_4h." in name]
    assert len(gated) >= 2
    for name in gated:
        assert torch.equal(found[name], weights[name]), name


LATENT = (
    "--multi-latent-attention --position-embedding-type rope --qk-layernorm --normalization RMSNorm "
    "--kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 6"
)
PREDICTS = "--position-embedding-type rope --mtp-num-layers 2"
CORE = {
    "latent attention": LATENT,
    "latents of queries, YaRN": f"{LATENT} --q-lora-rank 10 --rotary-scaling-factor 4 --mscale-all-dim 1",
    "latents, experts": f"{LATENT} --num-experts 4 --expert-interval 1 --moe-grouped-gemm --swiglu",
    "YaRN": "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64 "
    "--yarn-beta-fast 16 --no-yarn-correction-range-round-to-int --mscale 0.5",
    "sinks": "--softmax-type learnable --position-embedding-type rope",
    "quick gates": "--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7",
    "experts of quick gates": "--quick-geglu --num-experts 4 --expert-interval 1 --moe-router-linear-bias",
    "predictions": PREDICTS,
    "predictions, untied": f"{PREDICTS} --untie-embeddings-and-output-weights --swiglu",
    "one layer of predictions": f"{PREDICTS} --mtp-use-repeated-layer --mtp-loss-scaling-factor 0.3",
    "predictions, experts": f"{PREDICTS} --num-experts 4 --expert-interval 1",
    "predictions, latents": f"{PREDICTS} {LATENT}",
}


@pytest.mark.parametrize("network", CORE)
def test_parts_of_megatron_core_come_back(group, tmp_path, network):
    flags = CORE[network].split()
    weights = random_weights(tiny_plan(*flags, vocab_size=VOCAB).model)
    write_checkpoint(tmp_path / "own", weights, *flags, vocab_size=VOCAB)
    converted(tmp_path / "own", tmp_path / "theirs", saver="megatron", distributed=True)
    back = converted(tmp_path / "theirs", tmp_path / "back", saver="own")
    expected, found = read_manifest(tmp_path / "own" / "global_step3"), read_manifest(back)
    assert found.spec == expected.spec
    after = whole_weights(back, found)
    assert after.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(after[name], weights[name])] == []


@pytest.mark.parametrize("network", ["latent attention", "sinks", "quick gates", "predictions"])
def test_files_of_ranks_do_not_hold_parts_of_megatron_core(group, tmp_path, network):
    flags = CORE[network].split()
    weights = random_weights(tiny_plan(*flags, vocab_size=VOCAB).model)
    write_checkpoint(tmp_path / "own", weights, *flags, vocab_size=VOCAB)
    with problem("files of ranks cannot express … --ckpt-format torch_dist"):
        converted(tmp_path / "own", tmp_path / "theirs", saver="megatron")


def test_ranks_that_share_query_groups_come_back(group, tmp_path):
    flags = ("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2")
    weights = random_weights(tiny_plan(*flags, vocab_size=VOCAB).model)
    write_checkpoint(tmp_path / "own", weights, *flags, vocab_size=VOCAB)
    converted(tmp_path / "own", tmp_path / "theirs", saver="megatron", tensor=4)
    back = converted(tmp_path / "theirs", tmp_path / "back", saver="own")
    found = whole_weights(back, read_manifest(back))
    shared = [name for name in weights if ".query_key_value." in name]
    assert len(shared) == 4
    assert all(torch.equal(found[name], weights[name]) for name in shared)
    with problem("--num-query-groups 2 is not a multiple of --t 3, nor a divisor of it"):
        converted(tmp_path / "own", tmp_path / "others", saver="megatron", tensor=3)


@pytest.mark.parametrize(
    ("saved", "tokens"),
    [
        ({}, 90 * 16),
        ({"tokens": 0}, 90 * 16),
        ({"tokens": 700}, 700),  # with shorter sequences at first
        ({"consumed_train_tokens": 800}, 800),
    ],
)
def test_consumed_tokens_are_those_of_full_samples_where_the_files_lack_them(saved, tokens):
    arguments = {"consumed_train_samples": 90, "seq_length": 16, **saved}
    assert progress_of({"iteration": 9, **saved}, arguments)["tokens"] == tokens
