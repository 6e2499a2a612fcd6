"""Distributed checkpoints of Megatron-LM open here, bit for bit, and compute what they computed there.

The files are megatron-core's: see tests/foreign/make_torch_dist.py.
"""

import importlib.util
import os
import pickle
import re
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from problems import problem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.megatron_lm.convert import find
from megatron.checkpointing.megatron_lm.distributed_files import read_stored
from megatron.checkpointing.megatron_lm.megatron_files import write_megatron
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.digest import digest_of, digests
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.common.errors import CheckpointError

REPOSITORY = Path(__file__).resolve().parents[4]
FILES = REPOSITORY / "tests/foreign"
VOCAB, ROWS = 30, 32
TYPES = {"bert": "BERT", "t5": "T5"}
WITH_ENCODER = ["bert", "t5"]
HYBRIDS = ["hybrid", "hybrid_experts"]
LATENT = ["latent", "latent_experts"]
NETWORKS = [
    *("gpt", "llama", "experts", "some_experts", "shared_experts", "sinks", "predictions"),
    *(*LATENT, *WITH_ENCODER, *HYBRIDS),
]

THEIRS = (
    (r"^layers\.", "decoder.layers."),
    (r"^final_layernorm\.", "decoder.final_layernorm."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.query\.", ".self_attention.linear_q_proj."),
    (r"\.self_attention\.(q|kv)_(down|up)\.", r".self_attention.linear_\1_\2_proj."),
    (r"\.self_attention\.sinks$", ".self_attention.core_attention.softmax_offset"),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.inter_attention\.query\.", ".cross_attention.linear_q."),
    (r"\.inter_attention\.key_value\.", ".cross_attention.linear_kv."),
    (r"\.inter_attention\.dense\.", ".cross_attention.linear_proj."),
    (r"dense_h_to_4h\.", "linear_fc1."),
    (r"dense_4h_to_h\.", "linear_fc2."),
    (r"\.shared_expert_gate\.weight$", ".shared_experts.gate_weight"),
)
"""From our names of modules to those of megatron-core's parameters in a GPT."""
ENCODERS = {
    "bert": (
        (r"^decoder\.", "encoder."),
        (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
        (r"^lm_head\.bias$", "output_layer.bias"),
    ),
    "t5": (
        (r"^decoder\.(layers|final)", r"encoder.\1"),
        (r"^decoder\.decoder\.", "decoder."),
        (r"^decoder\.encoder\.", "decoder."),
        (r"\.post_attention_layernorm\.", ".pre_cross_attn_layernorm."),
        (r"\.post_inter_attention_layernorm\.", ".pre_mlp_layernorm."),
        (r"^(encoder.*)\.pre_cross_attn_layernorm\.", r"\1.pre_mlp_layernorm."),
        (r"^lm_head\.bias$", "lm_head.output_layer.bias"),
    ),
}


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


values = script(FILES / "make_torch_dist.py").values


def unpack(network, folder):
    """Return the folder of a run that megatron-core wrote."""
    with tarfile.open(FILES / "torch_dist" / f"{network}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / network


def convert(network, source, target, *words):
    tool = script(REPOSITORY / "tools/checkpoint/util.py")
    own = ["--model-type", TYPES.get(network, "GPT"), "--load-dir", source, "--save-dir", target]
    tool.main([*map(str, [*own, *words])])
    return target


def theirs(network, module):
    """Return megatron-core's name of the parameter of a module."""
    if network in HYBRIDS:
        name = theirs("gpt", module).replace("final_layernorm", "final_norm")
        return re.sub(r"layers\.(\d+)\.(\w+)", half_layer, name)
    own = (("^", "decoder."),) if module.startswith("decoder.") and network == "t5" else ()
    for pattern, other in (*own, *THEIRS, *ENCODERS.get(network, ())):
        module = re.sub(pattern, other, module)
    if network != "t5":
        module = module.replace(".post_attention_layernorm.", ".pre_mlp_layernorm.")
    return module


def half_layer(match):
    """Return the layer of a HybridModel that holds a part of a GPT's layer."""
    number = 2 * int(match[1]) + (match[2] in ("mlp", "pre_mlp_layernorm"))
    return f"layers.{number}.{match[2]}"


def expected(network, module, shape):
    """Return the weight of a module by the rule that the files were written with."""
    name, is_gate = theirs(network, module), "linear_fc1" in theirs(network, module)
    if ".experts." in name:
        each = [name.replace(".experts.", f".experts.local_experts.{n}.") for n in range(shape[0])]
        if is_gate:
            return torch.stack([interleaved(values(one, shape[1:])) for one in each])
        return torch.stack([values(one, (shape[2], shape[1])).T for one in each])
    full = values(name, shape)
    if ".linear_q_up" in name or ".linear_q_proj" in name:
        return torch.cat([*map(turned_first, full.chunk(4))])
    if ".linear_kv_down" in name:
        return turned_first(full).roll(-4, 0)
    return interleaved(full) if is_gate and network not in ("gpt", "bert", "t5", "hybrid") else full


def turned_first(rows):
    """Return the rows of a head with the four that have rotary positions in front, in halves."""
    return rows[
        [
            *range(len(rows) - 4, len(rows), 2),
            *range(len(rows) - 3, len(rows), 2),
            *range(len(rows) - 4),
        ]
    ]


def interleaved(halves):
    gate, up = halves.chunk(2)
    return torch.stack([row for pair in zip(gate, up, strict=True) for row in pair])


def logits(network, folder, tokens_bs):
    manifest = read_manifest(folder)
    model = load_network(manifest.spec, read_checkpoint(folder, manifest, optimizer=False))
    length = tokens_bs.shape[1]
    positions = torch.arange(length).expand_as(tokens_bs)
    batch = {"tokens": tokens_bs, "positions": positions}
    if network == "bert":
        batch["token_types"] = (positions > length // 2).long()
        batch["attention_span"] = torch.tensor([[[0, length]]] * len(tokens_bs))
    if network == "t5":
        lengths = torch.full((len(tokens_bs),), length)
        batch = {"tokens": tokens_bs, "lengths": lengths, "decoder_tokens": tokens_bs.flip(1)}
    with torch.no_grad():
        output = model(batch)
    return getattr(output, "logits", output)


@pytest.mark.parametrize("network", NETWORKS)
def test_files_of_megatron_core_open_bit_for_bit_and_compute_the_same(network, group, tmp_path):
    source = unpack(network, tmp_path)
    own = convert(network, source, tmp_path / "own", "--true-vocab-size", VOCAB) / "global_step7"
    manifest = read_manifest(own)
    assert (manifest.state.iteration, manifest.state.samples) == (7, 70)
    assert manifest.state.tokens == 70 * manifest.spec.seq_length
    checkpoint = read_checkpoint(own, manifest, optimizer=False)
    names = ParameterNames.of(manifest.spec)
    for name, parameter in checkpoint.parameters.items():
        found = parameter.weight.all()
        wanted = expected(network, names.module(name), found.shape)
        assert torch.equal(found, wanted), names.module(name)
    saved = torch.load(source / "expected.pt", weights_only=True)
    found = logits(network, own, saved["tokens"])[..., :VOCAB]
    wanted = saved["logits"][..., :VOCAB]
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.fixture
def folder(tmp_path):
    """The folder of a GPT's iteration."""
    return unpack("gpt", tmp_path) / "iter_0000007"


def change_metadata(folder, change):
    """Read the metadata with torch's own classes, and write them again."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_arguments_may_lie_among_the_tensors(folder, group, tmp_path):
    """As later versions of megatron-core write them, in place of common.pt."""
    before = find(folder, None)
    content = [dict(read_foreign(folder / "common.pt"))]
    with (folder / "__0_0.distcp").open("ab") as file:
        start = file.tell()
        torch.save(content, file)
        stored = _StorageInfo(file.name.rpartition("/")[2], start, file.tell() - start)
    (folder / "common.pt").unlink()
    with problem("common.pt … common_state/shard_0_1", CheckpointError):
        find(folder, None)

    def add(metadata):
        name = "common_state/shard_0_1"
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = stored

    change_metadata(folder, add)
    after = find(folder, None)
    assert after.values == before.values and len(after.values) > 10
    assert after.state == before.state
    # Behind a tracker, with the loader of the other format, too.
    assert find(folder.parent, "megatron").values == before.values


class Runs:
    """What a file that wants to run a command holds."""

    def __reduce__(self):
        return os.system, ("touch was_run",)


def test_nothing_that_a_file_asks_for_is_run(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    kept = {name: (folder / name).read_bytes() for name in (".metadata", "common.pt")}
    trap = pickle.dumps(Runs())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (folder / ".metadata").write_bytes(pickle.dumps({"a": Runs()}, protocol))
        with problem(".metadata … posix.system", CheckpointError):
            find(folder, None)
    for name in ("builtins.eval", "torch.load", "torch.distributed.launch.main"):
        module, _, attribute = name.rpartition(".")
        (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n(S'1'\ntR.".encode())
        with problem(f".metadata … {name}", CheckpointError):
            find(folder, None)
    # Functions of a module of the format are stand-ins as well.
    text = "ctorch.distributed.checkpoint.state_dict_saver\nsave\n(S'1'\ntR."
    (folder / ".metadata").write_bytes(text.encode())
    with problem(".metadata … torch.distributed.checkpoint … storage_data", CheckpointError):
        find(folder, None)
    (folder / ".metadata").write_bytes(kept[".metadata"])
    torch.save({"args": Runs()}, folder / "common.pt")
    with problem("common.pt … posix.system", CheckpointError):
        find(folder, None)
    (folder / "common.pt").write_bytes(kept["common.pt"])

    chunk = find(folder, None).checkpoint.parameters
    (name,) = (name for name in chunk if name.endswith("word_embeddings.weight"))
    position = table_in(folder)
    with (folder / position.relative_path).open("r+b") as file:
        file.seek(position.offset)
        file.write(trap)
    with problem("word_embeddings.weight … distcp … damaged", CheckpointError):
        find(folder, None).checkpoint.parameters[name]
    assert not Path("was_run").exists()


def table_in(folder):
    """Return where the embedding lies."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entries = metadata.storage_data.items()
    return next(at for index, at in entries if index.fqn == "embedding.word_embeddings.weight")


def away(metadata):
    for stored in metadata.storage_data.values():
        stored.relative_path = f"../{stored.relative_path}"


def compressed(metadata):
    for stored in metadata.storage_data.values():
        stored.transform_descriptors = ["stream.zstd"]


def without_a_layer(metadata):
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks.pop()


def without_a_parameter(metadata):
    del metadata.state_dict_metadata["decoder.final_layernorm.bias"]


def of_other_sizes(metadata):
    positions = metadata.state_dict_metadata["embedding.position_embeddings.weight"]
    positions.chunks[0].sizes = positions.size = torch.Size([16, 8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (away, ".metadata … __0_1.distcp"),
        (compressed, ".metadata … compressed"),
        (without_a_layer, "mlp.linear_fc1.weight … chunks … .metadata"),
        (without_a_parameter, "missing ['6.bias']"),
        (of_other_sizes, "position_embeddings.weight … .metadata"),
    ],
)
def test_damaged_metadata_are_refused(folder, group, tmp_path, change, message):
    change_metadata(folder, change)
    with problem(message, CheckpointError):
        convert("gpt", folder, tmp_path / "own", "--true-vocab-size", VOCAB)
    assert not [*tmp_path.glob("own/global_step*")]


def test_damaged_folders_are_refused(folder):
    size = (folder / "__0_0.distcp").stat().st_size
    os.truncate(folder / "__0_0.distcp", size // 4)
    os.truncate(folder / "__0_1.distcp", size // 4)
    with problem("word_embeddings.weight … __0_0.distcp … damaged", CheckpointError):
        [*find(folder, None).checkpoint.parameters.values()]
    (folder / "__0_0.distcp").unlink()
    with problem("__0_0.distcp: No such file", CheckpointError):
        [*find(folder, None).checkpoint.parameters.values()]
    (folder / ".metadata").unlink()
    with problem("latest_checkpointed_iteration.txt … .metadata", CheckpointError):
        find(folder, None)


def test_layers_of_a_hybrid_that_no_gpt_has_are_refused_by_name(tmp_path):
    """Names of other kinds of layers are put into files of attention and MLPs."""
    folder = unpack("hybrid", tmp_path) / "iter_0000007"
    kept = (folder / ".metadata").read_bytes()
    for names, pattern, message in (
        ({"self_attention.": "mixer."}, "*-M-", "layer 2 … Mamba"),
        ({"self_attention.linear_qkv.": "self_attention.in_proj."}, "*-G-", "layer 2 … DeltaNet"),
        ({"self_attention.linear_qkv.": "self_attention.linear_kv_"}, "*-+-", "layer 2 … latent"),
        ({"self_attention.": "mlp.", "linear_qkv": "linear_fc1"}, "*---", "layer 2 … MLP"),
        ({"self_attention.": "other."}, "*-?-", "layer 2 … unknown"),
    ):
        change_metadata(folder, partial(rename, layer=2, names=names))
        with problem(f"HybridModel … {pattern} … {message}", CheckpointError):
            find(folder, None)
        (folder / ".metadata").write_bytes(kept)
    change_metadata(folder, partial(remove, start="decoder.layers.3."))
    with problem("iter_0000007 … missing … *-*", CheckpointError):
        find(folder, None)


def rename(metadata, *, layer, names):
    """Give the tensors of a layer other names."""

    def other(name):
        if name.startswith(f"decoder.layers.{layer}."):
            for before, after in names.items():
                name = name.replace(before, after)
        return name

    entries = metadata.state_dict_metadata.items()
    metadata.state_dict_metadata = {other(name): entry for name, entry in entries}
    metadata.storage_data = {
        replace(index, fqn=other(index.fqn)): at for index, at in metadata.storage_data.items()
    }


def remove(metadata, *, start):
    """Take away the tensors whose names start so."""
    for name in [*metadata.state_dict_metadata]:
        if name.startswith(start):
            del metadata.state_dict_metadata[name]


@pytest.mark.parametrize("text", ['{"sharded_backend": "zarr"}', "[]", None])
def test_other_formats_are_refused_with_what_to_do(folder, text):
    (folder / "metadata.json").unlink()
    if text:
        (folder / "metadata.json").write_text(text)
    kind = "zarr" if text and "zarr" in text else "unknown"
    with problem(f"{kind} … metadata.json … --ckpt-format torch_dist", CheckpointError):
        find(folder, None)


SIZE = ["--true-vocab-size", VOCAB]
WORDS = ["--saver", "megatron", "--ckpt-format", "torch_dist"]
OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


_FUSED = {
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".q_layernorm.": ".linear_q_up_proj.layer_norm_",
    ".kv_layernorm.": ".linear_kv_up_proj.layer_norm_",
}
NORMS = {**_FUSED, **{fused: name for name, fused in _FUSED.items()}}
"""Parts of names of norms that megatron-core or Transformer Engine's layers have, and the other's."""


@pytest.mark.parametrize("network", [name for name in NETWORKS if name not in HYBRIDS])
def test_written_files_hold_what_megatron_core_wrote(network, group, tmp_path):
    source = unpack(network, tmp_path)
    own = convert(network, source, tmp_path / "own", *SIZE)
    written = convert(network, own, tmp_path / "written", *WORDS) / "iter_0000007"
    before, after = read_stored(source / "iter_0000007"), read_stored(written)
    # With Transformer Engine, which the files were written without, these norms have other names.
    norms = set(after.tensors) - set(before.tensors)
    assert bool(norms) == ("experts" in network or network in LATENT)
    assert set(before.tensors) <= set(after.tensors)
    for name in norms:
        (same,) = (each for each in NORMS if each in name)
        other = before.tensors[name.replace(same, NORMS[same])]
        assert torch.equal(after.tensors[name].load(), other.load())
    for name, tensor in before.tensors.items():
        found, wanted = after.tensors[name].load(), tensor.load()
        if name.endswith(OF_VOCABULARY):
            found, wanted = found[:VOCAB], wanted[:VOCAB]  # the padding is written anew
        assert torch.equal(found, wanted), name
    assert set(after.objects) == {*before.objects, "common_state/shard_0_1"}
    for name, piece in before.objects.items():
        assert after.objects[name].read() == piece.read() == [None]
    for name in ("metadata.json", "common.pt"):
        assert (written / name).is_file()
    again = convert(network, tmp_path / "written", tmp_path / "again", *SIZE)
    first, second = (read_manifest(folder / "global_step7") for folder in (own, again))
    assert second.spec == first.spec
    assert digest(again / "global_step7") == digest(own / "global_step7")
    (written / "common.pt").unlink()
    assert find(written, None).state["iteration"] == 7


def digest(folder):
    whole = read_checkpoint(folder, read_manifest(folder), optimizer=False)
    return digest_of(digests(whole, VOCAB))


def test_networks_that_megatron_lms_files_cannot_hold_are_refused_with_what_can_be_written(
    group, tmp_path
):
    own = convert("experts", unpack("experts", tmp_path), tmp_path / "own", *SIZE)
    with problem("--num-experts … --ckpt-format torch_dist"):
        convert("experts", own, tmp_path / "written", "--saver", "megatron")
    folder = own / "global_step7"
    manifest = read_manifest(folder)
    model = {**manifest.plan["model"], "num_experts": [4, 2]}
    changed = replace(manifest, plan={**manifest.plan, "model": model})
    checkpoint = read_checkpoint(folder, manifest, optimizer=False)
    how = {"tensor": 1, "pipeline": 1, "flags": ("", ""), "for_release": False}
    with problem("[2, 4] … --num-experts"):
        write_megatron(changed, checkpoint, tmp_path / "written", distributed=True, **how)
    model = {**manifest.plan["model"], "attention_softcap": 5.0}
    changed = replace(manifest, plan={**manifest.plan, "model": model})
    with problem("attention_softcap 5.0 … --attn-logit-softcapping"):
        write_megatron(changed, checkpoint, tmp_path / "written", distributed=True, **how)
    model = {**manifest.plan["model"], "architecture": "bert"}
    changed = replace(manifest, plan={**manifest.plan, "model": model})
    with problem("bert … --num-experts"):
        write_megatron(changed, checkpoint, tmp_path / "written", distributed=True, **how)
    model = {**manifest.plan["model"], "architecture": "retro", "num_experts": []}
    model |= {"retro_normed_residual": True, "final_norm": False}
    changed = replace(manifest, plan={**manifest.plan, "model": model})
    with problem("retro … torch_dist … --ckpt-format torch"):
        write_megatron(changed, checkpoint, tmp_path / "written", distributed=True, **how)
    assert not (tmp_path / "written").exists()
