"""BERT and T5 in the files of Megatron-LM: legacy layout of any ranks, core's names, old versions."""

import importlib.util
from pathlib import Path

import pytest
import torch
from checkpoints import random_weights, whole_weights, write_checkpoint
from problems import problem
from safetensors.torch import load_file
from tiny import tiny_config

from megatron.checkpointing.conversion.export import Export, ExportOptions, export
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.parameter_names import ParameterNames, is_of_vocabulary
from megatron.common.errors import CheckpointError
from megatron.config.plan.plan import plan
from megatron.tokenizer.build import build_tokenizer

TOOLS = Path(__file__).resolve().parents[2] / "tools"
VOCAB = 62
SIZES = {
    "bert": [
        *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4"),
        *("--seq-length", "12", "--max-position-embeddings", "16", "--vocab-size", "61"),
    ],
    "t5": [
        *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4"),
        *("--seq-length", "12", "--max-position-embeddings", "16", "--vocab-size", "61"),
        *("--decoder-num-layers", "4", "--decoder-seq-length", "6"),
    ],
}
KEYS = {
    "bert": """
        language_model.embedding.word_embeddings.weight
        language_model.embedding.position_embeddings.weight
        language_model.embedding.tokentype_embeddings.weight
        language_model.encoder.layers.3.input_layernorm.weight
        language_model.encoder.layers.3.self_attention.query_key_value.bias
        language_model.encoder.layers.3.mlp.dense_h_to_4h.weight
        language_model.encoder.final_layernorm.weight
        language_model.pooler.dense.weight lm_head.bias lm_head.dense.weight
        lm_head.layernorm.weight binary_head.weight
    """,
    "t5": """
        language_model.embedding.word_embeddings.weight
        language_model.embedding.position_embeddings.weight
        language_model.encoder.layers.1.post_attention_layernorm.weight
        language_model.encoder.final_layernorm.weight
        language_model.decoder.layers.3.inter_attention.query.weight
        language_model.decoder.layers.3.inter_attention.key_value.bias
        language_model.decoder.layers.3.inter_attention.dense.weight
        language_model.decoder.layers.3.post_inter_attention_layernorm.weight
        language_model.decoder.final_layernorm.weight lm_head.bias
    """,
}
CORE = {
    "post_inter_attention_layernorm": "pre_mlp_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "inter_attention.query": "cross_attention.linear_q",
    "inter_attention.key_value": "cross_attention.linear_kv",
    "inter_attention.dense": "cross_attention.linear_proj",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
    "lm_head.layernorm": "lm_head.layer_norm",
}


def tool(name, *words):
    spec = importlib.util.spec_from_file_location("tool_to_test", TOOLS / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(map(str, words)))


def written(directory, architecture, *flags):
    """Write a random network in our files; return its folder."""
    flags = [*SIZES[architecture], "--tokenizer-type", "NullTokenizer", *flags]
    model = plan(
        tiny_config(*flags), world_size=4, vocab_size=VOCAB, device="cpu", objective=architecture
    ).model
    weights = random_weights(model)
    return write_checkpoint(directory, weights, *flags, vocab_size=VOCAB, objective=architecture)


def convert(architecture, source, target, *words):
    places = ["--load-dir", source, "--save-dir", target]
    tool("checkpoint/util.py", "--model-type", architecture.upper(), *places, *words)


def full_names(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from full_names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def module_weights(folder):
    """Return {module name: unsharded weight} of a checkpoint, without padding of the vocabulary."""
    manifest = read_manifest(folder)
    names = ParameterNames.of(manifest.spec)
    return {
        names.module(name): weight[:VOCAB] if is_of_vocabulary(name) else weight
        for name, weight in whole_weights(folder, manifest).items()
    }


def require_equal(found, expected):
    assert {*found} == {*expected}
    for name, weight in expected.items():
        assert torch.equal(found[name].float(), weight.float()), name


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_any_ranks_are_written_and_read_back(architecture, group, tmp_path, capsys):
    saved = written(tmp_path / "own", architecture)
    expected = module_weights(saved)
    for tensor, pipeline in ((1, 1), (2, 2), (4, 1)):
        theirs, back = (tmp_path / f"{kind}{tensor}{pipeline}" for kind in ("theirs", "back"))
        sizes = ["--target-tensor-parallel-size", tensor]
        sizes += ["--target-pipeline-parallel-size", pipeline]
        convert(architecture, tmp_path / "own", theirs, "--saver", "megatron", *sizes)
        assert len([*theirs.glob("iter_0000003/mp_rank_*/*.pt")]) == tensor * pipeline
        convert(architecture, theirs, back, "--saver", "own")
        require_equal(module_weights(back / "global_step3"), expected)
    capsys.readouterr()
    tool("checkpoint/inspect.py", tmp_path / "theirs22")
    assert f"util.py --model-type {architecture.upper()} --loader" in capsys.readouterr().out
    tool("checkpoint/digest.py", tmp_path / "back11")
    digest = capsys.readouterr().out.split()[0]
    tool("checkpoint/digest.py", tmp_path / "back22")
    assert capsys.readouterr().out.split()[0] == digest
    file = tmp_path / "theirs11/iter_0000003/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)["model"]
    assert {*KEYS[architecture].split()} <= {name for name, _ in full_names(state)}
    tool(
        *("merge_mp_partitions.py", "--model-type", architecture.upper()),
        *("--load", tmp_path / "theirs22", "--save", tmp_path / "merged"),
    )
    merged = torch.load(
        tmp_path / "merged/iter_0000003/mp_rank_00/model_optim_rng.pt", weights_only=False
    )
    require_equal(dict(full_names(merged["model"])), dict(full_names(state)))


def test_stages_of_t5_begin_with_the_shared_tables(group, tmp_path):
    """Embeddings are in the first stage of each stack, and stages of either stack hold only its."""
    written(tmp_path / "own", "t5")
    theirs = tmp_path / "theirs"
    sizes = ["--target-pipeline-parallel-size", 3]
    convert("t5", tmp_path / "own", theirs, "--saver", "megatron", *sizes)
    files = sorted(theirs.glob("iter_0000003/*/*.pt"))
    stages = [torch.load(file, weights_only=False) for file in files]
    assert [{*stage["model"]["language_model"]} for stage in stages] == [
        {"embedding", "encoder"},
        {"embedding", "decoder"},
        {"decoder"},
    ]
    assert {*stages[2]["model"]} == {"language_model", "lm_head", "word_embeddings_for_head"}
    assert stages[0]["args"].pipeline_model_parallel_split_rank == 1
    with problem("--target-pipeline-parallel-size 8 … 2 layers"):
        sizes = ["--target-pipeline-parallel-size", 8]
        convert("t5", tmp_path / "own", tmp_path / "no", "--saver", "megatron", *sizes)


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_the_names_of_megatron_core_open(architecture, group, tmp_path):
    expected = module_weights(written(tmp_path / "own", architecture))
    convert(architecture, tmp_path / "own", tmp_path / "theirs", "--saver", "megatron")
    file = tmp_path / "theirs/iter_0000003/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    core = {}
    for name, weight in full_names(content["model"]):
        name = name.removeprefix("language_model.")
        if ".inter_attention." not in name and "post_inter" not in name:
            to = "pre_cross_attn_layernorm" if name.startswith("decoder") else "pre_mlp_layernorm"
            name = name.replace("post_attention_layernorm", to)
        for ours, theirs in CORE.items():
            name = name.replace(ours, theirs)
        if name == "lm_head.bias":
            name = "output_layer.bias" if architecture == "bert" else "lm_head.output_layer.bias"
        core[name] = weight
    torch.save({**content, "model": core}, file)
    convert(architecture, tmp_path / "theirs", tmp_path / "back", "--saver", "own")
    require_equal(module_weights(tmp_path / "back/global_step3"), expected)


def test_the_published_bert_opens(group, tmp_path, capsys):
    """Its form: release/mp_rank_00, fp16, old names, {q, k, v} x heads, no arguments, no version."""
    expected = module_weights(written(tmp_path / "own", "bert"))
    expected = {name: weight.half() for name, weight in expected.items()}
    language = {"embedding": {}, "transformer": {}, "pooler": {}}
    model = {"language_model": language, "lm_head": {}, "binary_head": {}}
    for name, weight in expected.items():
        part, _, rest = name.partition(".")
        if part == "embedding":
            table, _, key = rest.partition(".")
            language["embedding"][table] = {key: weight}
        elif part in ("layers", "final_layernorm"):
            if "query_key_value" in name:
                weight = weight.unflatten(0, (4, 3, 4)).transpose(0, 1).flatten(0, 2)
            old = name.replace("self_attention", "attention")
            language["transformer"][old] = weight.contiguous()
        else:
            (language if part == "pooler" else model)[part][rest] = weight
    file = tmp_path / "theirs/release/mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"model": model, "iteration": 2_000_000}, file, _use_new_zipfile_serialization=False)
    (tmp_path / "theirs/latest_checkpointed_iteration.txt").write_text("release")

    words = ["--saver", "own", "--num-attention-heads", 4]
    convert("bert", tmp_path / "theirs", tmp_path / "back", *words, "--true-vocab-size", VOCAB)
    folder = tmp_path / "back/global_step0"
    require_equal(module_weights(folder), expected)
    plan = read_manifest(folder).plan
    assert (plan["precision"]["dtype"], plan["objective"]["name"]) == ("fp16", "bert")
    assert "pretrain_bert.py --use-checkpoint-args" in capsys.readouterr().out
    with problem(f"99 tokens … {VOCAB}"):
        convert("bert", tmp_path / "theirs", tmp_path / "no", *words, "--true-vocab-size", 99)
    with problem("--model-type GPT … BERT"):
        convert("gpt", tmp_path / "theirs", tmp_path / "no", *words, "--true-vocab-size", VOCAB)


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [("bert", ""), ("bert", "--untie-embeddings-and-output-weights"), ("t5", "")],
)
def test_any_layout_is_exported_by_our_own_names(architecture, flags, group, tmp_path):
    """Shared words and positions are read once, whatever stages hold them."""
    arguments = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1}
    tokenizer = build_tokenizer(**arguments)
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    for name, words in (("one", []), ("four", layout)):
        folder = written(tmp_path / name, architecture, *flags.split(), *words)
        job = Export(
            source=folder,
            manifest=read_manifest(folder),
            tokenizer=tokenizer,
            tokenizer_arguments=arguments,
            options=ExportOptions(),
        )
        export(job, tmp_path / f"{name}-out", "safetensors")
    found = load_file(tmp_path / "four-out/model.safetensors")
    require_equal(found, module_weights(tmp_path / "one/global_step3"))
    assert ("output_layer.weight" in found) == bool(flags)
    assert len(found["lm_head.bias"]) == VOCAB
    require_equal(load_file(tmp_path / "one-out/model.safetensors"), found)
    if architecture == "t5":
        with problem("another network … --exporter safetensors", CheckpointError):
            export(job, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()
