"""Retro in the files of Megatron core: names, row order, form, and back again."""

import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from checkpoints import random_weights, write_checkpoint
from problems import problem
from retro_golden import CORE_LOGITS, CORE_LOSS, golden_batch, golden_tensor
from tiny import tiny_config
from torch.testing import assert_close

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.parameter_names import is_of_vocabulary
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.config.plan.plan import plan

TOOLS = Path(__file__).resolve().parents[3] / "tools"
ARGUMENTS = {
    **{"num_layers": 9, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 64},
    **{"seq_length": 16, "max_position_embeddings": 16, "layernorm_epsilon": 1e-5},
    **{"position_embedding_type": "learned_absolute", "bias_gelu_fusion": False},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": 32},
    **{"retro_num_neighbors": 2, "retro_num_retrieved_chunks": 2, "retro_gpt_chunk_length": 4},
    **{"retro_encoder_layers": 2, "retro_encoder_hidden_dropout": 0.0},
    **{"retro_encoder_attention_dropout": 0.0},
}
SIZES = [
    *("--num-layers", "6", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "12", "--retro-chunk-length", "4", "--vocab-size", "61"),
    *("--tokenizer-type", "NullTokenizer", "--swiglu", "--untie-embeddings-and-output-weights"),
    "--use-rotary-position-embeddings",
]
FORM = ["--retro-normed-residual", "--retro-no-final-norm"]


def convert(source, target, *words):
    spec = importlib.util.spec_from_file_location("tool", TOOLS / "checkpoint" / "util.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    places = ["--model-type", "RETRO", "--load-dir", str(source), "--save-dir", str(target)]
    module.main([*places, *words])


def fused(tag, names):
    """Yield weight and bias of linear layers whose rows are interleaved by head."""
    for kind, shape in (("weight", (16, 16)), ("bias", (16,))):
        parts = [golden_tensor(f"{tag}.{name}.{kind}", *shape) for name in names]
        yield kind, torch.stack([part.unflatten(0, (4, 4)) for part in parts], 1).flatten(0, 2)


def core_layer(tag, prefix, *, crosses, norm="pre_mlp_layernorm"):
    """Yield the golden weights of one layer by core's names."""
    plain = {
        "input_layernorm": ("innorm", 16),
        "self_attention.linear_proj": ("self.out", 16, 16),
        norm: ("mlpnorm", 16),
        "mlp.linear_fc1": ("mlp.fc1", 64, 16),
        "mlp.linear_fc2": ("mlp.fc2", 16, 64),
    }
    groups = {"self_attention.linear_qkv": ("self", "qkv")}
    if crosses:
        plain["pre_cross_attn_layernorm"] = ("crossnorm", 16)
        plain["cross_attention.attn.linear_proj"] = ("cross.out", 16, 16)
        groups["cross_attention.attn.linear_q"] = ("cross", "q")
        groups["cross_attention.attn.linear_kv"] = ("cross", "kv")
    for core, (ours, *shape) in plain.items():
        yield f"{prefix}.{core}.weight", golden_tensor(f"{tag}.{ours}.weight", *shape)
        yield f"{prefix}.{core}.bias", golden_tensor(f"{tag}.{ours}.bias", shape[0])
    for core, (part, names) in groups.items():
        for kind, tensor in fused(f"{tag}.{part}", names):
            yield f"{prefix}.{core}.{kind}", tensor


def core_weights():
    weights = {
        "embedding.word_embeddings.weight": golden_tensor("embed.word", 32, 16),
        "embedding.position_embeddings.weight": golden_tensor("embed.position", 16, 16),
    }
    for number in range(1, 10):
        prefix = f"decoder.layers.{number - 1}"
        weights |= core_layer(f"dec{number}", prefix, crosses=number in (6, 9))
    encoder = "decoder.layers.5.cross_attention.encoder.layers"
    first_norm = "pre_mlp_layernorm.norm"
    weights |= core_layer("enc1", f"{encoder}.0", crosses=True, norm=first_norm)
    weights |= core_layer("enc2", f"{encoder}.1", crosses=False)
    return {name: tensor.float() for name, tensor in weights.items()}


def write_core(folder, weights):
    file = folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    arguments = Namespace(**ARGUMENTS)
    content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 5, "model": weights}
    torch.save(content, file)


def read_core(folder, rank=0):
    (file,) = folder.glob(f"iter_*/mp_rank_{rank:02d}/model_optim_rng.pt")
    return torch.load(file, weights_only=False)


def test_logits_of_a_core_checkpoint_are_the_golden_ones(group, tmp_path):
    weights = core_weights()
    write_core(tmp_path / "core", weights)
    convert(tmp_path / "core", tmp_path / "own", "--saver", "own", "--true-vocab-size", "32")
    folder = tmp_path / "own" / "global_step5"
    manifest = read_manifest(folder)
    network = load_network(
        manifest.spec, read_checkpoint(folder, manifest, optimizer=False)
    ).double()
    batch = golden_batch()
    with torch.no_grad():
        logits = network(batch)
    found = torch.stack([logits[0, 0, :4], logits[0, 3, :4], logits[1, 15, :4]])
    assert_close(found, torch.tensor(CORE_LOGITS, dtype=torch.float64), rtol=0, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert loss.item() == pytest.approx(CORE_LOSS, abs=1e-4)

    convert(tmp_path / "own", tmp_path / "back", "--saver", "megatron")
    back = read_core(tmp_path / "back")
    assert {*back["model"]} == {*weights}
    for name, tensor in weights.items():
        assert torch.equal(back["model"][name], tensor), name
    saved = vars(back["args"])
    own = {name: value for name, value in ARGUMENTS.items() if name in saved}
    assert {name for name in ARGUMENTS if "retro" in name} <= {*own}
    assert own == {name: saved[name] for name in own}


def own_checkpoint(folder, *flags):
    model = plan(
        tiny_config(*SIZES, *flags), world_size=1, vocab_size=62, device="cpu", objective="retro"
    ).model
    return write_checkpoint(
        folder, random_weights(model), *SIZES, *flags, vocab_size=62, objective="retro"
    )


def test_any_tensor_parallel_ranks_are_written_and_read_back(group, tmp_path):
    saved = own_checkpoint(tmp_path / "own", *FORM)
    target = "--target-tensor-parallel-size", "2"
    convert(tmp_path / "own", tmp_path / "core", "--saver", "megatron", *target)
    convert(tmp_path / "core", tmp_path / "back", "--saver", "own", "--true-vocab-size", "62")
    first, again = (
        read_checkpoint(folder, read_manifest(folder), optimizer=False).parameters
        for folder in (saved, *(tmp_path / "back").glob("global_step*"))
    )
    assert {*first} == {*again}
    for name in first:
        rows = slice(62 if is_of_vocabulary(name) else None)  # the others are padding
        expected, found = (each[name].weight.all()[rows] for each in (first, again))
        assert torch.equal(found, expected), name
    folder = next((tmp_path / "back").glob("global_step*"))
    own = read_manifest(folder).spec.own
    assert (own.retro_chunk_length, own.retro_retrieved_length) == (4, 8)


@pytest.mark.parametrize(
    ("flags", "words", "message"),
    [
        (FORM[:1], (), "--retro-no-final-norm"),
        (FORM[1:], (), "--retro-normed-residual"),
        ([*FORM, "--retro-attention-gate", "0.5"], (), "--retro-attention-gate 1"),
        ([*FORM, "--lora-rank", "2"], (), "adapters"),
        (FORM, ("--target-pipeline-parallel-size", "2"), "parallel-size 2 … write 1"),
    ],
)
def test_what_core_does_not_compute_is_refused(flags, words, message, group, tmp_path):
    own_checkpoint(tmp_path / "own", *flags)
    with problem(message):
        convert(tmp_path / "own", tmp_path / "core", "--saver", "megatron", *words)
