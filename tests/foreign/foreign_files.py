"""Files of other programs, written from transformers' models by a second reading of their formats."""

import json
import math
import sys
from argparse import Namespace
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

BLOCK = {
    "input_layernorm": "ln_1",
    "self_attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def split(name, tensor, tensor_ranks):
    """Return the shards of a parameter that is not fused."""
    if name.endswith(("dense_h_to_4h.weight", "dense_h_to_4h.bias", "word_embeddings.weight")):
        return tensor.chunk(tensor_ranks)
    if name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
        return tensor.chunk(tensor_ranks, 1)
    return [tensor] * tensor_ranks


def fused(query, key, value, *, heads, tensor_ranks, version):
    """Return the shards of queries, keys and values, [rows, ...] each, in the order of a version."""
    shards = []
    for rank in range(tensor_ranks):
        own = range(rank * heads // tensor_ranks, (rank + 1) * heads // tensor_ranks)
        by_head = [x.reshape(heads, len(x) // heads, -1) for x in (query, key, value)]
        features = by_head[0].shape[1]
        if version == 0:
            rows = [x[a, d] for x in by_head for a in own for d in range(features)]
        elif version == 1:
            rows = [x[a, d] for a in own for d in range(features) for x in by_head]
        else:
            rows = [x[a, d] for a in own for x in by_head for d in range(features)]
        shards.append(torch.stack(rows).reshape(len(rows), *query.shape[1:]))
    return shards


def gpt2_layer(model, layer, *, tensor_ranks, version):
    """Return {name: shards} of a block of GPT-2 as Megatron-LM has it."""
    state, found = model.state_dict(), {}
    for ours, theirs in BLOCK.items():
        for kind in ("weight", "bias"):
            tensor = state[f"transformer.h.{layer}.{theirs}.{kind}"]
            tensor = tensor.T if tensor.dim() == 2 else tensor
            found[f"{ours}.{kind}"] = split(f"{ours}.{kind}", tensor, tensor_ranks)
    for kind in ("weight", "bias"):
        stacked = state[f"transformer.h.{layer}.attn.c_attn.{kind}"]
        parts = (stacked.T if stacked.dim() == 2 else stacked).chunk(3)
        found[f"self_attention.query_key_value.{kind}"] = fused(
            *parts, heads=model.config.n_head, tensor_ranks=tensor_ranks, version=version
        )
    return found


def with_padding(table, rows):
    """Return a table of tokens with rows of padding."""
    return torch.cat([table, torch.full((rows - len(table), table.shape[1]), 0.3)])


def write_gpt2_as_megatron(model, folder, *, version, tensor_ranks, stages, rows):
    """Write a checkpoint of Megatron-LM's of iteration 7."""
    config = model.config
    args = Namespace(
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        ffn_hidden_size=4 * config.n_embd,
        kv_channels=config.n_embd // config.n_head,
        seq_length=config.n_positions,
        max_position_embeddings=config.n_positions,
        layernorm_epsilon=config.layer_norm_epsilon,
        bias_gelu_fusion=True,
        openai_gelu=False,
        tokenizer_type="GPT2BPETokenizer",
        vocab_file="/nowhere/vocab.json",
        merge_file="/nowhere/merges.txt",
        make_vocab_size_divisible_by=4,
        padded_vocab_size=rows,
        consumed_train_samples=70,
        consumed_valid_samples=3,
        params_dtype=torch.float32,
    )
    state, per_stage = model.state_dict(), config.n_layer // stages
    table = with_padding(state["transformer.wte.weight"], rows)
    for stage in range(stages):
        for rank in range(tensor_ranks):
            transformer = {}
            for local in range(per_stage):
                block = gpt2_layer(
                    model, stage * per_stage + local, tensor_ranks=tensor_ranks, version=version
                )
                for name, shards in block.items():
                    name = name if version else name.replace("self_attention", "attention")
                    transformer[f"layers.{local}.{name}"] = shards[rank].clone()
            language = {"encoder" if version else "transformer": transformer}
            content = {"model": {"language_model": language}, "iteration": 7}
            if stage == 0:
                words = {"weight": table.chunk(tensor_ranks)[rank].clone()}
                positions = {"weight": state["transformer.wpe.weight"]}
                language["embedding"] = {
                    "word_embeddings": words,
                    "position_embeddings": positions,
                }
            if stage == stages - 1:
                for kind in ("weight", "bias"):
                    transformer[f"final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
                if stages > 1:
                    copy = {"weight": table.chunk(tensor_ranks)[rank].clone()}
                    content["model"]["word_embeddings_for_head"] = copy
            if version:
                content |= {"checkpoint_version": float(version), "args": args}
                content["rng_state"] = [{"np_rng_state": np.random.RandomState(1).get_state()}]
            place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            name = "iter_0000007" if version else "release"
            file = folder / name / place / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            # The published files of version 0 are older than torch's zip files.
            torch.save(content, file, _use_new_zipfile_serialization=bool(version))
    content = "7" if version else "release"
    (folder / "latest_checkpointed_iteration.txt").write_text(content)


@contextmanager
def program_with_positions():
    """Let there be an enumeration of BigScience's program while its files are written."""
    modules = {name: ModuleType(name) for name in ("megatron.enums",)}
    positions = Enum("PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3})
    positions.__module__ = "megatron.enums"
    modules["megatron.enums"].PositionEmbeddingType = positions
    sys.modules |= modules
    yield positions
    for name in modules:
        del sys.modules[name]


def bloom_layers(model, *, tensor_ranks, rows, shift=0):
    """Return {number of a layer: {name: shards}} of BLOOM in BigScience's numbers."""
    state, layers = model.state_dict(), model.config.n_layer
    table = with_padding(state["transformer.word_embeddings.weight"], rows)
    first = {"word_embeddings.weight": table.chunk(tensor_ranks)}
    last = {}
    for kind in ("weight", "bias"):
        norm = state[f"transformer.word_embeddings_layernorm.{kind}"]
        first[f"word_embeddings.norm.{kind}"] = [norm] * tensor_ranks
        last[kind] = [state[f"transformer.ln_f.{kind}"]] * tensor_ranks
    found = {1: first}
    for layer in range(layers):
        found[3 + layer - shift] = block = {}
        for name in (*BLOCK, "self_attention.query_key_value"):
            for kind in ("weight", "bias"):
                tensor = state[f"transformer.h.{layer}.{name}.{kind}"]
                own = f"{name}.{kind}"
                fused_here = name.endswith("query_key_value")
                block[own] = (
                    tensor.chunk(tensor_ranks) if fused_here else split(own, tensor, tensor_ranks)
                )
    found[4 + layers - shift] = last
    return found


def write_bloom_as_bigscience(
    model, folder, *, tensor_ranks, stages, replicas, rows, states, fp16=False
):
    """Write a checkpoint of BigScience's of iteration 9 with the states of ZeRO's stage 1.

    Args:
        fp16: whether the network is in 16 bits.
        states: (number of a layer, name) -> whole tensors "exp_avg" and "exp_avg_sq".
    """
    config = model.config
    own = folder / "global_step9"
    own.mkdir(parents=True)
    (folder / "latest").write_text("global_step9")
    layers = bloom_layers(model, tensor_ranks=tensor_ranks, rows=rows)
    for number, parameters in layers.items():
        for rank in range(tensor_ranks):
            dtype = torch.float16 if fp16 else torch.float32
            shards = {name: parts[rank].clone().to(dtype) for name, parts in parameters.items()}
            torch.save(shards, own / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    with program_with_positions() as positions:
        args = Namespace(
            num_layers=config.n_layer,
            hidden_size=config.hidden_size,
            num_attention_heads=config.n_head,
            ffn_hidden_size=4 * config.hidden_size,
            seq_length=16,
            max_position_embeddings=16,
            position_embedding_type=positions.alibi,
            embed_layernorm=True,
            layernorm_epsilon=config.layer_norm_epsilon,
            bias_gelu_fusion=True,
            glu_activation=None,
            pad_vocab_size_to=rows,
            make_vocab_size_divisible_by=4,
            consumed_train_samples=90,
            consumed_valid_samples=0,
            bf16=False,
            fp16=fp16,
            params_dtype=torch.float32,
        )
        per_stage = [[n for n in sorted(layers) if n <= 3], [n for n in sorted(layers) if n > 3]]
        for stage in range(stages):
            for rank in range(tensor_ranks):
                number = stage * tensor_ranks + rank
                shapes, flats = stage_shapes(layers, per_stage[stage], rank, states, stage)
                torch.save(
                    {
                        "module": None,
                        "args": args,
                        "checkpoint_version": 3.0,
                        "iteration": 9,
                        "tokens": 1440,
                        "checkpoint_info": {
                            "padded_vocab_size": rows,
                            "original_vocab_size": config.vocab_size,
                        },
                        "param_shapes": shapes,
                        "global_steps": 9,
                        "global_samples": 90,
                        "skipped_steps": 1,
                        "np_rng_state": np.random.RandomState(1).get_state(),
                        "ds_config": {"zero_optimization": {"stage": 1}},
                    },
                    own / f"mp_rank_{number:02d}_model_states.pt",
                )
                write_optimizer(own, number, flats, replicas)


def stage_shapes(layers, numbers, rank, states, stage):
    """Return the shapes of two groups of parameters, decayed or not, and their flat tensors."""
    shapes, flats = [{}, {}], [{"fp32": [], "exp_avg": [], "exp_avg_sq": []} for _ in range(2)]
    named = [(n, name, parts) for n in numbers for name, parts in layers[n].items()]
    if stage > 0:  # the copy of the tied table
        named += [(1, name, parts) for name, parts in layers[1].items() if "norm" not in name]
    for number, name, parts in named:
        prefix = "tied_modules.embed." if number == 1 else f"{number}."
        group = int(parts[0].dim() == 1)
        shapes[group][prefix + name] = parts[rank].shape
        tensors = {"fp32": parts[rank], **states(number, name, parts, rank)}
        for state, tensor in tensors.items():
            flats[group][state].append(tensor.reshape(-1))
    return shapes, flats


def write_optimizer(folder, number, flats, replicas):
    """Write the flat tensors of two groups in equal parts, padded at the end."""
    joined = [{state: torch.cat(parts) for state, parts in flat.items()} for flat in flats]
    for replica in range(replicas):

        def part(tensor, replica=replica):
            size = math.ceil(len(tensor) / replicas)
            padded = torch.cat([tensor, torch.zeros(size * replicas - len(tensor))])
            return padded[replica * size : (replica + 1) * size].clone()

        base = {
            group: {"step": 8, **{s: part(flat[s]) for s in ("exp_avg", "exp_avg_sq")}}
            for group, flat in enumerate(joined)
        }
        content = {
            "optimizer_state_dict": {
                "base_optimizer_state": {"state": base, "param_groups": [{}, {}]},
                "single_partition_of_fp32_groups": [part(flat["fp32"]) for flat in joined],
                "partition_count": replicas,
            }
        }
        name = f"zero_pp_rank_{replica}_mp_rank_{number:02d}_optim_states.pt"
        torch.save(content, folder / name)


def write_llama_as_meta(model, folder, *, ranks):
    """Write Meta's files of a Llama; its rotary pairs are neighbours."""
    config, state = model.config, model.state_dict()
    folder.mkdir()

    def neighbours(weight, heads):
        by_head = weight.reshape(heads, 2, -1, weight.shape[1])
        return torch.stack([by_head[:, 0], by_head[:, 1]], 2).reshape(weight.shape)

    rows, columns = {}, {"tok_embeddings.weight": state["model.embed_tokens.weight"]}
    copies = {"norm.weight": state["model.norm.weight"], "rope.freqs": torch.zeros(2)}
    rows["output.weight"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        theirs, meta = f"model.layers.{layer}.", f"layers.{layer}."
        for x, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            weight = state[f"{theirs}self_attn.{x}_proj.weight"]
            rows[f"{meta}attention.w{x}.weight"] = neighbours(weight, heads)
        rows[f"{meta}attention.wv.weight"] = state[f"{theirs}self_attn.v_proj.weight"]
        columns[f"{meta}attention.wo.weight"] = state[f"{theirs}self_attn.o_proj.weight"]
        rows[f"{meta}feed_forward.w1.weight"] = state[f"{theirs}mlp.gate_proj.weight"]
        rows[f"{meta}feed_forward.w3.weight"] = state[f"{theirs}mlp.up_proj.weight"]
        columns[f"{meta}feed_forward.w2.weight"] = state[f"{theirs}mlp.down_proj.weight"]
        copies[f"{meta}attention_norm.weight"] = state[f"{theirs}input_layernorm.weight"]
        copies[f"{meta}ffn_norm.weight"] = state[f"{theirs}post_attention_layernorm.weight"]
    for rank in range(ranks):
        content = {
            **{name: w.chunk(ranks)[rank].clone() for name, w in rows.items()},
            **{name: w.chunk(ranks, 1)[rank].clone() for name, w in columns.items()},
            **copies,
        }
        torch.save(content, folder / f"consolidated.{rank:02d}.pth")
    content = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
    }
    Path(folder / "params.json").write_text(json.dumps(content))
