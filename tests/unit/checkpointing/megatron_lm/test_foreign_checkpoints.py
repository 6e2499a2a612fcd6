"""Checkpoints of other programs open here, and compute what they computed there."""

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from foreign_files import (
    bloom_layers,
    program_with_positions,
    write_bloom_as_bigscience,
    write_gpt2_as_megatron,
    write_llama_as_meta,
)
from problems import problem, require_problem
from tiny import batch_of, tiny_config
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.lock import hold_lock
from megatron.checkpointing.manifest import names_in, read_manifest
from megatron.checkpointing.megatron_lm.arguments import OF_NETWORK, values_of
from megatron.checkpointing.megatron_lm.convert import find
from megatron.checkpointing.resharding.digest import digest_of, digests
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.config.config import words_of
from megatron.config.network.model_resolution import full_attention_layers_of

TOOLS = Path(__file__).resolve().parents[4] / "tools"
VOCAB, ROWS = 50, 56
GPT = ("--model-type", "GPT")


@pytest.fixture(scope="module")
def gpt2():
    return random_model(
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=4),
    )


@pytest.fixture(scope="module")
def bloom():
    config = BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=4)
    return random_model(BloomForCausalLM, config)


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return random_model(LlamaForCausalLM, config)


def random_model(cls, config):
    """Return a model in which every number matters, those of norms and biases too."""
    torch.manual_seed(3)
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name or "ln_" in name else 0.0
            parameter.normal_(around if name.endswith("weight") else 0.0, 0.3)
    return model


def tool(name, *words):
    spec = importlib.util.spec_from_file_location("tool_to_test", TOOLS / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(map(str, words)))


def convert(source, target, *words):
    tool("checkpoint/util.py", *GPT, "--load-dir", source, "--save-dir", target, *words)
    return next(target.glob("global_step*"))


def logits(folder):
    manifest = read_manifest(folder)
    spec = manifest.spec
    network = load_network(spec, read_checkpoint(folder, manifest, optimizer=False))
    tokens_bs = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    positions_bs = torch.arange(16).expand(2, -1)
    with torch.no_grad():
        return tokens_bs, network(batch_of(tokens_bs, positions_bs))[..., :VOCAB]


def require_same_logits(folder, model):
    tokens_bs, found = logits(folder)
    with torch.no_grad():
        expected = model(tokens_bs).logits
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def state_digest(folder):
    manifest = read_manifest(folder)
    whole = read_checkpoint(folder, manifest, optimizer=False)
    return digest_of(digests(whole, manifest.spec.vocabulary.vocab_size))


@pytest.mark.parametrize(
    ("version", "tensor_ranks", "stages"), [(0, 1, 1), (0, 2, 1), (1, 2, 1), (2, 2, 2), (3, 1, 2)]
)
def test_every_version_of_megatron_lm_opens(
    gpt2, group, tmp_path, capsys, version, tensor_ranks, stages
):
    sizes = {"tensor_ranks": tensor_ranks, "stages": stages}
    write_gpt2_as_megatron(gpt2, tmp_path / "theirs", version=version, rows=ROWS, **sizes)
    words = ["--saver", "own", "--true-vocab-size", VOCAB]
    if version == 0:
        with problem("release … arguments … --num-attention-heads", CheckpointError):
            convert(tmp_path / "theirs", tmp_path / "ours", *words)
        words += ["--num-attention-heads", 4]
    folder = convert(tmp_path / "theirs", tmp_path / "ours", *words)
    require_problem(f"{ROWS - VOCAB} … {ROWS} … padding", [capsys.readouterr().out])
    require_same_logits(folder, gpt2)
    manifest = read_manifest(folder)
    assert manifest.state.iteration == (7 if version else 0)
    assert manifest.state.samples == (70 if version else 0)
    assert manifest.spec.vocabulary.padded_vocab_size == ROWS
    # As in that program, until a run begins anew from its weights.
    assert manifest.spec.vocabulary.padded_vocab_in_softmax is True
    assert manifest.tokenizer.padded_vocab_in_softmax is None
    assert manifest.network_flags.num_layers == 2
    assert not manifest.checkpoint.saves_optimizer


def write_bloom(model, folder, **kwargs):
    def states(number, name, parts, rank):
        whole = expected_state(number, name, model)
        shape = parts[rank].shape
        dim = next((d for d in range(whole.dim()) if whole.shape[d] != shape[d]), None)
        piece = whole if dim is None else whole.chunk(2, dim)[rank]
        return {"exp_avg": piece, "exp_avg_sq": piece.square()}

    sizes = {"tensor_ranks": 2, "stages": 2, "replicas": 3, "rows": ROWS}
    write_bloom_as_bigscience(model, folder, states=states, **sizes, **kwargs)


def test_a_state_in_fp16_is_laid_out_without_a_gpu(bloom, tmp_path):
    write_bloom(bloom, tmp_path / "theirs", fp16=True)
    folder = convert(tmp_path / "theirs", tmp_path / "ours")
    script = TOOLS / "convert_checkpoint/deepspeed_to_deepspeed.py"
    places = ["--input_folder", folder, "--output_folder", tmp_path / "files"]
    subprocess.run([sys.executable, script, *places], check=True, capture_output=True)
    moved = tmp_path / "files/global_step9"
    assert (moved / "zero_pp_rank_0_mp_rank_00_optim_states.pt").is_file()
    assert read_manifest(moved).spec.vocabulary.padded_vocab_in_softmax is True
    main = torch.load(moved / "mp_rank_00_model_states.pt", weights_only=False)
    assert {tensor.dtype for tensor in main["module"].values()} == {torch.float16}
    whole, manifest = {}, read_manifest(folder)
    for place in (folder, moved):
        state = read_checkpoint(place, read_manifest(place))
        whole[place] = digest_of(digests(state, manifest.spec.vocabulary.vocab_size))
    assert whole[folder] == whole[moved]


def test_bigscience_opens_with_its_optimizer(bloom, group, tmp_path):
    write_bloom(bloom, tmp_path / "theirs")
    folder = convert(tmp_path / "theirs", tmp_path / "ours")
    require_same_logits(folder, bloom)
    manifest = read_manifest(folder)
    assert manifest.checkpoint.saves_optimizer
    assert manifest.state == TrainState(iteration=9, samples=90, tokens=1440, skipped=1)
    whole = read_checkpoint(folder, manifest)
    assert whole.counters == {"global_steps": 9, "global_samples": 90, "skipped_steps": 1}
    names = {
        (number, name): f"{number if number > 1 else 'tied_modules.embed'}.{name}"
        for number, parameters in bloom_layers(bloom, tensor_ranks=1, rows=ROWS).items()
        for name in parameters
    }
    assert set(names.values()) == set(whole.parameters)
    for (number, name), ours in names.items():
        parameter, expected = whole.parameters[ours], expected_state(number, name, bloom)
        assert parameter.steps == 8
        assert torch.equal(parameter.states["exp_avg"].all(), expected), ours
        assert torch.equal(parameter.states["exp_avg_sq"].all(), expected.square()), ours


def expected_state(number, name, model):
    """Return a state of the shape of a whole parameter that tells every element from others."""
    shape = bloom_layers(model, tensor_ranks=1, rows=ROWS)[number][name][0].shape
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape) + 1000 * number + len(name)


def test_bigscience_without_the_states_and_microsofts_numbers_open(bloom, group, tmp_path):
    layers = bloom_layers(bloom, tensor_ranks=1, rows=ROWS, shift=1)
    folder = tmp_path / "theirs"
    folder.mkdir()
    for number, parameters in layers.items():
        shards = {name: parts[0].clone() for name, parts in parameters.items()}
        torch.save(shards, folder / f"layer_{number:02d}-model_00-model_states.pt")
    with problem("theirs … mp_rank_00_model_states.pt … arguments", CheckpointError):
        find(folder, None)
    args = Namespace(
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 16},
        **{"position_embedding_type": "alibi", "embed_layernorm": True, "layernorm_epsilon": 1e-5},
    )
    main = {"args": args, "iteration": 2, "checkpoint_info": {"original_vocab_size": VOCAB}}
    torch.save(main, folder / "mp_rank_00_model_states.pt")
    require_same_logits(convert(folder, tmp_path / "ours"), bloom)
    # As early versions of Python 3.11 pickle members of an enumeration.
    with program_with_positions() as positions:
        positions.__reduce_ex__ = lambda self, protocol: (getattr, (type(self), self.name))
        args.position_embedding_type = positions.alibi
        torch.save(main, folder / "mp_rank_00_model_states.pt")
    require_same_logits(convert(folder, tmp_path / "named"), bloom)
    args.position_embedding_type = "alibi"
    args.num_key_value_heads = 2
    torch.save(main, folder / "mp_rank_00_model_states.pt")
    with problem("--num-key-value-heads 2 … order … Hugging Face", CheckpointError):
        find(folder, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_metas_files_of_llama_open(llama, group, tmp_path, ranks):
    write_llama_as_meta(llama, tmp_path / "theirs", ranks=ranks)
    folder = convert(tmp_path / "theirs", tmp_path / "ours", "--seq-length", 16)
    require_same_logits(folder, llama)
    assert read_manifest(folder).spec.attention.num_query_groups == 2


def test_models_of_transformers_come_in_by_the_same_door(gpt2, group, tmp_path):
    gpt2.save_pretrained(tmp_path / "theirs")
    folder = convert(tmp_path / "theirs", tmp_path / "ours", "--loader", "hugging_face")
    require_same_logits(folder, gpt2)
    with hold_lock(tmp_path / "busy"), problem("--save … busy/lock.json", CheckpointError):
        convert(tmp_path / "theirs", tmp_path / "busy", "--loader", "hugging_face")
    weights = next(folder.glob("zero/*word_embeddings.weight/fp32.pt"))
    flipped = bytearray(weights.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    weights.write_bytes(flipped)
    with problem("fp32.pt … damaged … hash", CheckpointError):
        state_digest(folder)
    places = ["--load-dir", tmp_path / "theirs", "--save-dir", tmp_path / "other"]
    with problem("--saver own … --saver megatron"):
        tool("checkpoint/util.py", *GPT, "--saver", "megatron", *places)


def test_written_megatron_lm_files_are_read_back(llama, tmp_path, capsys):
    write_llama_as_meta(llama, tmp_path / "meta", ranks=1)
    gated = tmp_path / "own"
    folder = convert(tmp_path / "meta", gated, "--seq-length", 16)
    targets = ["--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2]
    theirs = tmp_path / "megatron"
    places = ["--load-dir", gated, "--save-dir", theirs]
    tool("checkpoint/util.py", *GPT, "--saver", "megatron", *places, *targets)
    assert len([*theirs.glob("iter_0000000/mp_rank_*_*/*.pt")]) == 4
    back = convert(theirs, tmp_path / "back", "--saver", "own")
    assert state_digest(back) == state_digest(folder)
    tool("merge_mp_partitions.py", *GPT, "--load", theirs, "--save", tmp_path / "merged")
    assert [file.parent.name for file in (tmp_path / "merged").glob("*/*/*.pt")] == ["mp_rank_00"]
    again = convert(tmp_path / "merged", tmp_path / "again", "--saver", "own")
    assert state_digest(again) == state_digest(folder)
    before = {file: file.read_bytes() for file in theirs.rglob("*.pt")}
    with problem("iter_0000000 exists", CheckpointError):
        tool("merge_mp_partitions.py", *GPT, "--load", theirs, "--save", theirs)
    assert before == {file: file.read_bytes() for file in theirs.rglob("*.pt")}
    assert "are ignored: our own files" not in capsys.readouterr().out
    convert(theirs, tmp_path / "third", "--saver", "own", *targets)
    assert "are ignored: our own files" in capsys.readouterr().out

    cache = ["--object-storage-cache-path", tmp_path / "cache"]
    at_urls = ["--load", theirs.as_uri(), "--save", f"{tmp_path.as_uri()}/bucket/merged", *cache]
    tool("merge_mp_partitions.py", *GPT, *at_urls)
    found, merged = ({*names_in(tmp_path / name)} for name in ("bucket/merged", "merged"))
    assert found == merged
    at_urls = ["--load-dir", theirs.as_uri(), "--save-dir", f"{tmp_path.as_uri()}/bucket/own"]
    tool("checkpoint/util.py", *GPT, "--saver", "own", *at_urls, *cache)
    assert state_digest(tmp_path / "bucket/own" / folder.name) == state_digest(folder)


def test_settings_that_megatron_has_by_the_same_name_are_read():
    assert {"rope_scaling_factor", "fp32_residual_connection"} <= {f.name for f in OF_NETWORK}
    saved = {"softmax_type": "learnable", "kv_lora_rank": 32, "mscale": 1.0}
    found = values_of(Namespace(**saved, position_embedding_type="yarn", yarn_beta_fast=16.0))
    assert (found["softmax_type"], found["position_embedding_type"]) == ("learnable", "yarn")
    # Defaults of latent attention are saved with every network; YaRN has some of its names.
    assert "kv_lora_rank" not in found
    assert (found["mscale"], found["rope_high_freq_factor"]) == (1.0, 16.0)
    assert values_of(Namespace(softmax_type="off-by-one"))["softmax_type"] == "off-by-one"
    assert values_of(Namespace(no_rope_freq=[0, 0, 1]))["no_rope_freq"] == "[0,0,1]"
    latent = values_of(Namespace(multi_latent_attention=True, kv_lora_rank=32, kv_channels=4))
    assert latent["kv_lora_rank"] == 32 and "kv_channels" not in latent
    values = values_of(Namespace(use_rope_scaling=True, rope_scaling_factor=4.0))
    assert {"use_rope_scaling": True, "rope_scaling_factor": 4.0}.items() <= values.items()


@pytest.mark.parametrize("pattern", [2, [1, 0]])
def test_windows_of_some_layers_are_read_from_the_arguments_of_megatron_lm(pattern):
    flags = words_of(values_of(Namespace(window_size=(3, 0), window_attn_skip_freq=pattern)))
    assert full_attention_layers_of(tiny_config(*flags).model) == (2,)


def test_missing_flags_are_named(gpt2, tmp_path):
    theirs = tmp_path / "theirs"
    write_gpt2_as_megatron(gpt2, theirs, version=3, rows=ROWS, tensor_ranks=2, stages=1)
    own = ["--saver", "own"]
    with problem("56 rows … --true-vocab-size"):
        convert(theirs, tmp_path / "ours", *own)
    with problem("99 tokens … iter_0000007 … 56 rows"):
        convert(theirs, tmp_path / "ours", *own, "--true-vocab-size", 99)
    with problem("h_to_4h.weight … [64, 16] … [32, 16]", CheckpointError):
        convert(
            *(theirs, tmp_path / "other", *own),
            *("--true-vocab-size", VOCAB, "--ffn-hidden-size", 32),
        )
    with problem("missing ['5.input_layernorm.bias'", CheckpointError):
        convert(*(theirs, tmp_path / "other", *own, "--true-vocab-size", VOCAB, "--num-layers", 3))
    assert not [*tmp_path.glob("o*/global_step*")]
    with problem("--model-type BERT … --model-type GPT"):
        tool(
            "checkpoint/util.py",
            *("--model-type", "BERT", "--load-dir", theirs, "--save-dir", tmp_path / "ours"),
        )
    with problem("--tensor-model-parallel-size 3 … 2 … --target-tensor-model-parallel-size"):
        tool("merge_mp_partitions.py", *GPT, "--load", theirs, "--tensor-model-parallel-size", 3)
    with problem("--model-type RACE … GPT, BERT, RETRO, T5"):
        tool("merge_mp_partitions.py", "--model-type", "RACE", "--load", theirs)
    with problem("--target-pipeline-model-parallel-size 5 … num_layers 2"):
        tool(
            "merge_mp_partitions.py",
            *(*GPT, "--load", theirs, "--target-pipeline-model-parallel-size", 5),
        )
    (theirs / "iter_0000007/mp_rank_00/model_optim_rng.pt").unlink()
    with problem("model_optim_rng.pt … mp_rank_00, stage 0", CheckpointError):
        find(theirs, None)
    with problem(f"{tmp_path} … no checkpoint … format", CheckpointError):
        find(tmp_path, None)


class Runs:
    """What a file that wants to run a command holds."""

    def __reduce__(self):
        return os.system, ("touch was_run",)


class Unknown:
    """What belongs to no program that is known."""


@pytest.mark.parametrize("thing", [Runs(), Unknown(), print])
def test_no_code_in_a_file_is_run(tmp_path, monkeypatch, thing):
    monkeypatch.chdir(tmp_path)
    for zipped in (True, False):
        torch.save({"args": thing}, "file.pt", _use_new_zipfile_serialization=zipped)
        with problem("file.pt … refers to", CheckpointError):
            read_foreign(Path("file.pt"))
    assert not Path("was_run").exists()


def test_inspect_prints_the_command_that_opens_a_checkpoint(gpt2, llama, tmp_path, capsys):
    megatron, meta = tmp_path / "megatron", tmp_path / "meta"
    write_gpt2_as_megatron(gpt2, megatron, version=2, rows=ROWS, tensor_ranks=1, stages=1)
    write_llama_as_meta(llama, meta, ranks=1)
    tool("checkpoint/inspect.py", megatron, "--parameters")
    printed = capsys.readouterr().out
    assert "checkpoint: Megatron-LM's\n" in printed
    assert "iteration: 7 | samples: 70 | tokens: 1120 | valid_samples: 3" in printed
    assert f"vocabulary: unknown | embedding rows: {ROWS}" in printed
    assert "tied_modules.embed.position_embeddings.weight [16, 16] | fp32" in printed
    command = printed.splitlines()[-1].removeprefix("to use it: tools/")
    assert command.endswith("--save-dir NEW --true-vocab-size N")
    words = command.replace("NEW", str(tmp_path / "new")).replace(" N", f" {VOCAB}").split()
    tool(*words)
    tool("checkpoint/inspect.py", tmp_path / "new")
    assert "resume with: pretrain_gpt.py --use-checkpoint-args --load" in capsys.readouterr().out
    tool("checkpoint/inspect.py", meta)
    assert "checkpoint: Llama in Meta's files\n" in capsys.readouterr().out
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text("{}")
    tool("checkpoint/inspect.py", tmp_path / "hub")
    assert "to use it: tools/convert_checkpoint/from_hf.py --load" in capsys.readouterr().out
    with problem(f"{tmp_path} … no checkpoint … format", CheckpointError):
        tool("checkpoint/inspect.py", tmp_path)


@pytest.mark.parametrize("name", ["inspect.py", "digest.py", "util.py"])
def test_scripts_beside_inspect_find_the_standard_librarys(name, tmp_path):
    (tmp_path / "tools").symlink_to(TOOLS)
    for folder in (TOOLS, tmp_path / "tools"):
        words = [sys.executable, folder / "checkpoint" / name, "--help"]
        done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout.startswith(f"usage: {name}")
    # Both are loaded before Python knows the script's folder.
    first = (TOOLS / "checkpoint" / name).read_text().split('"""')[2].split("\n\n")[1]
    assert first == "import os.path\nimport sys"
