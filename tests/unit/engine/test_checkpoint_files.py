"""Checkpoints in the files of others, and what tools tell of them."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoints import whole_weights
from problems import problem
from tiny import VOCAB_SIZE, tiny_config, tiny_plan

from megatron.checkpointing.manifest import Manifest, record_file, write_manifest
from megatron.checkpointing.resharding.unpickle import read_foreign, read_tensors
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError, ConfigError
from megatron.tensor_parallel.sharding import shard_of

TOOLS = Path(__file__).resolve().parents[3] / "tools"
NETWORK = [
    *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4", "--swiglu"),
    *("--group-query-attention", "--num-query-groups", "2", "--embed-layernorm"),
]


@pytest.fixture
def saved(build, micro_batch, tmp_path):
    """Return a function from flags to the folder and manifest of a checkpoint after a step."""

    def save(*flags):
        engine = build(*NETWORK, *flags)
        engine.train_batch(iter([micro_batch(0)]))
        engine.save(tmp_path, "global_step1", {})
        folder = tmp_path / "global_step1"
        named = engine.module.named_parameters()
        manifest = Manifest(
            state=TrainState(iteration=1, samples=2, tokens=12, valid_samples=5),
            plan=json.loads(json.dumps(tiny_plan(*NETWORK, *flags).to_dict())),
            config=asdict(tiny_config(*NETWORK, *flags)),
            versions={"torch": "2"},
            partition_dims={name: shard.dim for name, p in named if (shard := shard_of(p))},
            files=tuple(map(record_file, sorted(folder.iterdir()))),
        )
        write_manifest(folder, manifest)
        return folder, manifest

    return save


def run(name, *words):
    spec = importlib.util.spec_from_file_location(Path(name).stem, TOOLS / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(map(str, words)))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--padded-vocab-in-softmax"],
        ["--untie-embeddings-and-output-weights", "--bf16"],
    ],
    ids=" ".join,
)
def test_megatrons_shards_make_up_the_network(saved, tmp_path, flags):
    folder, manifest = saved(*flags)
    out = tmp_path / "megatron"
    words = ["--input_folder", folder, "--output_folder", out, "--target_tp", 2, "--target_pp", 2]
    run("convert_checkpoint/deepspeed_to_megatron.py", *words)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "1"
    files = {
        (tensor, stage): torch.load(
            out / f"iter_0000001/mp_rank_{tensor:02d}_{stage:03d}/model_optim_rng.pt",
            weights_only=False,
        )
        for tensor in range(2)
        for stage in range(2)
    }
    args = files[0, 0]["args"]
    assert (args.consumed_train_samples, args.padded_vocab_size, args.swiglu) == (2, 16, True)
    assert files[1, 1]["checkpoint_version"] == 3.0

    weights = {name: w.float() for name, w in whole_weights(folder, manifest).items()}
    is_tied = "--bf16" not in flags
    tied = "tied_modules.embed." if is_tied else "1."
    # Of padding that took part in the softmax the last row goes on, of other padding a token's.
    kept = 12 if "--padded-vocab-in-softmax" in flags else VOCAB_SIZE

    def shard(name, tensor):
        table = weights[name][:kept]
        return torch.cat([table, table[-1:].expand(16 - kept, 16)]).chunk(2)[tensor]

    for tensor in range(2):
        first, last = (files[tensor, stage]["model"] for stage in range(2))
        embedding = first["language_model"]["embedding"]
        own = shard(f"{tied}word_embeddings.weight", tensor)
        assert torch.equal(embedding["word_embeddings"]["weight"].float(), own)
        assert "embedding" not in last["language_model"]
        norm = embedding["word_embeddings"]["norm.weight"].float()
        assert torch.equal(norm, weights[f"{tied}word_embeddings.norm.weight"])
        if not is_tied:
            head = last["language_model"]["output_layer"]["weight"].float()
            assert torch.equal(head, shard("9.word_embeddings.weight", tensor))
            assert embedding["word_embeddings"]["weight"].dtype == torch.bfloat16
        else:
            assert torch.equal(last["word_embeddings_for_head"]["weight"], own)
        final = last["language_model"]["encoder"]["final_layernorm.weight"].float()
        assert torch.equal(final, weights["8.weight"])
        assert "final_layernorm.weight" not in first["language_model"]["encoder"]

    for layer in range(4):
        stage, local = divmod(layer, 2)
        encoders = [files[t, stage]["model"]["language_model"]["encoder"] for t in range(2)]
        shards = [
            {k.removeprefix(f"layers.{local}."): v.float() for k, v in encoder.items()}
            for encoder in encoders
        ]
        for name, dim in (
            ("self_attention.query_key_value.weight", 0),
            ("self_attention.dense.weight", 1),
            ("mlp.dense_4h_to_h.weight", 1),
        ):
            whole = torch.cat([shard[name] for shard in shards], dim)
            assert torch.equal(whole, weights[f"{3 + layer}.{name}"]), name
        assert torch.equal(
            shards[1]["mlp.dense_4h_to_h.bias"], weights[f"{3 + layer}.mlp.dense_4h_to_h.bias"]
        )
        for kind in ("weight", "bias"):
            ours = weights[f"{3 + layer}.mlp.dense_h_to_4h.{kind}"]
            halves = [shard[f"mlp.dense_h_to_4h.{kind}"].chunk(2) for shard in shards]
            assert torch.equal(torch.cat([gate for gate, _ in halves]), ours[0::2])
            assert torch.equal(torch.cat([up for _, up in halves]), ours[1::2])


def test_a_network_is_divided_evenly_or_not_at_all(saved, tmp_path):
    folder, _ = saved()
    words = ["--input_folder", folder, "--output_folder", tmp_path / "out", "--for_release"]
    run("convert_checkpoint/deepspeed_to_megatron.py", *words)
    file = tmp_path / "out/iter_0000001/mp_rank_00/model_optim_rng.pt"
    assert torch.load(file, weights_only=False)["args"].consumed_valid_samples == 0
    with pytest.raises(ConfigError) as caught:
        run(
            "convert_checkpoint/deepspeed_to_megatron.py",
            *(*words, "--target_tp", 8, "--target_pp", 3),
        )
    assert caught.value.problems == (
        "--target_pp 3 does not divide num_layers 4",
        "--target_tp 8 does not divide num_attention_heads 4",
    )


def test_files_are_listed_with_their_ranks_and_tensors(saved, capsys):
    folder, _ = saved("--bf16", "--zero-stage", "2")
    run("convert_checkpoint/inspect_deepspeed_checkpoint.py", "--folder", folder, "--target_tp", 2)
    printed = capsys.readouterr().out
    assert "bytes, network of stage 0, tensor rank 0\n" in printed
    assert "bytes, optimizer of stage 0, tensor rank 0, replica 0\n" in printed
    assert "bytes, RNG states of rank 0\n" in printed
    assert "3.self_attention.dense.weight: [16, 8] on each of 2, stage 0 of 1\n" in printed
    (file,) = folder.glob("*optim_states.pt")
    run("convert_checkpoint/inspect_checkpoint.py", file)
    printed = capsys.readouterr().out
    assert "optimizer_state_dict.base_optimizer_state.state.0.step: [] float32\n" in printed
    name = "optimizer_state_dict.param_slice_mappings[1].8.weight.numel"
    assert f"{name}: 16\n" in printed


@pytest.mark.parametrize("kept", [0, 300, -1], ids=["empty", "cut short", "text"])
def test_a_file_that_torch_cannot_read_is_one_message(tmp_path, kept):
    file = tmp_path / "file.pt"
    torch.save({"weight": torch.zeros(50)}, file)
    file.write_bytes(file.read_bytes()[:kept] if kept >= 0 else b"hello world")
    for read in (read_tensors, read_foreign):
        with pytest.raises(CheckpointError) as caught:
            read(file)
        reason = "it was not saved by torch, or it is damaged or truncated"
        assert str(caught.value) == f"{file} cannot be read: {reason}"
    with problem("none.pt … No such file", CheckpointError):
        read_tensors(tmp_path / "none.pt")


def test_a_missing_path_is_named():
    for name in ("checkpoint/digest.py", "checkpoint/inspect.py"):
        with problem("argument … path of a checkpoint"):
            run(name)


def test_a_file_that_wants_to_run_something_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(1), "path": Path("x")}, tmp_path / "file.pt")
    with problem("file.pt … pathlib", CheckpointError):
        read_tensors(tmp_path / "file.pt")
