"""Training that Megatron-LM began goes on here as it would have gone on there.

The files are megatron-core's: see tests/foreign/make_trained.py.
"""

import importlib
import os
import pickle
import sys
import tarfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from problems import problem, require_problem

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.megatron_lm.convert import Conversion, convert, find
from megatron.checkpointing.megatron_lm.distributed_files import read_stored
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.checkpointing.saved_run import checkpoint_flags
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.config.config import Config, parse_config
from megatron.config.plan.plan import plan
from megatron.engine.deepspeed import distributed
from megatron.objectives.gpt import GPT, gpt_batch
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import resume
from megatron.training.setup import build_engine, build_process_groups
from megatron.training.setup import choose as choose_kernels

FILES = Path(__file__).resolve().parents[3] / "foreign"
VOCAB = 30


@pytest.fixture
def made(monkeypatch):
    """The script that made the files."""
    monkeypatch.syspath_prepend(str(FILES))
    yield importlib.import_module("make_trained")
    for name in ("make_trained", "make_torch_dist"):
        sys.modules.pop(name, None)


def unpack(name, folder):
    with tarfile.open(FILES / "trained" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def convert_to(output, source):
    """Return what the conversion says."""
    conversion = Conversion(source=source, output=output, flags=("", ""))
    needed = {"micro_batch_size": 1, "lr": 1, "train_iters": 1, "data_path": ["none"]}
    needed["true_vocab_size"] = VOCAB
    return list(convert(conversion, lambda found: Config.of(**{**found, **needed})))


def resumed(folder, made, *words):
    """Return an engine and the state of a run that goes on from `folder`."""
    flags = (
        f"--use-checkpoint-args --load {folder} --micro-batch-size 2 --lr {made.LR} --seed 1 "
        f"--train-iters 20 --weight-decay {made.DECAY} --adam-beta2 {made.BETAS[1]} --clip-grad 0 "
        "--data-path none --attention-dropout 0 --hidden-dropout 0 --no-load-rng "
        "--override-opt_param-scheduler --padded-vocab-in-softmax"
    ).split()
    flags += words
    config, _ = parse_config(flags, defaults=checkpoint_flags(flags).flags)
    decided = plan(config, world_size=1, vocab_size=VOCAB, device="cpu")
    distributed.start("gloo")
    kernels, _ = choose_kernels(decided, torch.device("cpu"))
    engine, state = (
        build_engine(decided, build_process_groups(decided), GPT(), kernels),
        TrainState(),
    )
    resume(engine, decided, state, choose_checkpoint(decided))
    engine.set_lr(made.LR)
    engine.set_weight_decay(made.DECAY)
    return engine, state


def losses(engine, made):
    following = range(made.TAKEN, made.TAKEN + made.FOLLOWING)
    return [float(engine.train_batch(iter([gpt_batch(made.rows(n))]))) for n in following]


@pytest.mark.parametrize(
    ("name", "zero_stage"), [("gpt", "0"), ("gpt", "1"), ("gpt", "2"), ("experts", "1")]
)
def test_the_next_steps_are_those_of_megatron_core(
    group, tmp_path, monkeypatch, caplog, made, name, zero_stage
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    source = unpack(name, tmp_path)
    lines = convert_to(tmp_path / "own", source)
    assert f"--load {tmp_path / 'own'} --no-load-rng --override-opt_param-scheduler" in lines[-2]
    engine, state = resumed(tmp_path / "own", made, "--zero-stage", zero_stage)
    assert (state.iteration, state.samples) == (7, 70)
    assert any(
        f"was converted from {source / 'iter_0000007'}: the data" in m for m in caplog.messages
    )
    assert not [text for text in caplog.messages if "--lr " in text or "--train-iters " in text]
    expected = torch.load(source / "expected.pt", weights_only=True)["losses"]
    assert losses(engine, made) == pytest.approx(expected, rel=1e-5)


def test_states_matter(group, tmp_path, monkeypatch, made):
    """Without them the second step is another one."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    source = unpack("gpt", tmp_path)
    convert_to(tmp_path / "own", source)
    engine, _ = resumed(tmp_path / "own", made, "--zero-stage", "1", "--no-load-optim")
    expected = torch.load(source / "expected.pt", weights_only=True)["losses"]
    found = losses(engine, made)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1:] != pytest.approx(expected[1:], rel=1e-3)


def test_master_weights_are_read_in_place_of_16_bit_weights(group, tmp_path, made):
    """Also those of the optimizer that is not distributed."""
    source = unpack("undivided", tmp_path)
    convert_to(tmp_path / "own", source)
    folder = tmp_path / "own/global_step7"
    read = read_checkpoint(folder, read_manifest(folder)).parameters
    stored = read_stored(source / "iter_0000007").tensors
    for own, theirs in (
        ("tied_modules.embed.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("6.weight", "decoder.final_layernorm.weight"),
    ):
        parameter = read[own]
        assert parameter.steps == made.TAKEN
        assert parameter.states.keys() == {"exp_avg", "exp_avg_sq"}
        for name, tensor in parameter.tensors.items():
            state = {"fp32": "fp32_param"}.get(name, name)
            wanted = stored[f"optimizer.state.{state}.{theirs}"].load()
            assert wanted.dtype == torch.float32 and wanted.std() > 0
            assert torch.equal(tensor.all(), wanted), (name, own)
        rounded = stored[theirs].load()
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(parameter.weight.all().bfloat16(), rounded)
        assert not torch.equal(parameter.weight.all(), rounded.float())


@pytest.mark.parametrize("name", ["buckets", "expert_buckets"])
def test_states_that_depend_on_the_layout_are_left_out_with_what_to_save(
    group, tmp_path, monkeypatch, made, name
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    source = unpack(name, tmp_path)
    notice, *lines = convert_to(tmp_path / "own", source)
    require_problem("only weights … dp_reshardable … --dist-ckpt-optim-fully-reshardable", [notice])
    assert any(f"--load {tmp_path / 'own'} --finetune" in line for line in lines)
    with problem("--dist-ckpt-optim-fully-reshardable … --no-load-optim", CheckpointError):
        resumed(tmp_path / "own", made)
    engine, _ = resumed(tmp_path / "own", made, "--finetune")
    expected = torch.load(source / "expected.pt", weights_only=True)["losses"]
    assert losses(engine, made)[0] == pytest.approx(expected[0], rel=1e-5)


def without_a_state(metadata):
    del metadata.state_dict_metadata["optimizer.state.exp_avg.decoder.final_layernorm.bias"]


def flattened(metadata):
    """Give a state the shape that versions before 0.16 gave those of parts of a parameter."""
    name = "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"
    metadata.state_dict_metadata[name].size = torch.Size([2, 1, 1, 384])


def of_muon(metadata):
    entries = metadata.state_dict_metadata
    name = "optimizer.state.exp_avg.decoder.final_layernorm.bias"
    entries["optimizer.state.momentum_buffer.decoder.final_layernorm.bias"] = entries[name]
    for index in [*metadata.storage_data]:
        if index.fqn == name:
            moved = replace(index, fqn=name.replace("exp_avg", "momentum_buffer"))
            metadata.storage_data[moved] = metadata.storage_data[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_state, "exp_avg … decoder.final_layernorm.bias … missing"),
        (flattened, "exp_avg_sq … mlp.linear_fc1.weight … [2, 1, 1, 384]"),
        (of_muon, "Adam … momentum_buffer"),
    ],
)
def test_states_that_are_not_those_of_every_parameter_are_left_out(tmp_path, change, message):
    folder = unpack("gpt", tmp_path) / "iter_0000007"
    assert find(folder, None).has_optimizer
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    found = find(folder, None)
    assert not found.has_optimizer
    require_problem(message, found.notices)
    assert all(not parameter.states for parameter in found.checkpoint.parameters.values())


def test_states_without_a_number_of_steps_are_left_out(tmp_path):
    folder = unpack("gpt", tmp_path) / "iter_0000007"
    common = dict(read_foreign(folder / "common.pt"))
    plain = {k: v for k, v in vars(common["args"]).items() if isinstance(v, int | float | str)}
    common["args"] = Namespace(**plain)
    steps = [group.pop("step") for group in common["optimizer"]["optimizer"]["param_groups"]]
    # Several optimizers, as of experts on ranks of their own.
    torch.save({**common, "optimizer": {0: {}, 1: {"step": steps[0]}}}, folder / "common.pt")
    assert find(folder, None).has_optimizer
    torch.save(common, folder / "common.pt")
    found = find(folder, None)
    assert not found.has_optimizer and "number of steps" in found.notices[0]
