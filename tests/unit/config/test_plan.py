"""What is decided for a run."""

import json
import math
from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config, tiny_plan, tiny_spec

from megatron.config.data.tokenizer import (
    padded_vocab_size,
    tokenizer_arguments,
    without_idle_fields,
)
from megatron.config.network.model_spec import flat
from megatron.config.parallelism.recompute_plan import NOTHING, RecomputePlan

ALL = RecomputePlan(granularity="full", method="uniform", num_layers=1, share=1.0)


def nones(decided, name="plan"):
    if decided is None:
        yield name
    if is_dataclass(decided):
        for field in fields(decided):
            yield from nones(getattr(decided, field.name), f"{name}.{field.name}")


def test_nothing_stays_undecided_but_parts_that_a_gpt_lacks():
    parts = ("moe", "latent", "lora", "prediction", "own", "head")
    own = [f"plan.model.{part}" for part in parts]
    assert [*nones(tiny_plan())] == [*own, "plan.data.cut", "plan.objective.own"]


def test_json_holds_every_decision():
    plan = tiny_plan("--bf16")
    assert json.loads(json.dumps(plan.to_dict()))["model"] == flat(plan.model) | {
        "num_experts": [],  # JSON has no tuples
        "lora_target_modules": [],
        "own_flags": [],
        "full_attention_layers": [],
        "labels": [],
        "retro_layers": [],
        "unrotated_layers": [],
        "rope_short_factors": [],
        "rope_long_factors": [],
    }
    assert set(json.loads(json.dumps(plan.to_dict()))) == {field.name for field in fields(plan)}


def test_sizes_that_are_not_said_follow_from_the_others():
    model = tiny_plan().model
    assert (model.mlp.ffn_hidden_size, model.attention.head_dim) == (32, 4)
    assert model.positions.max_position_embeddings == 6


@pytest.mark.parametrize(
    ("flags", "decided"),
    [
        ("", {"position_embedding": "learned", "rotary_dim": 0, "num_query_groups": 2}),
        ("--position-embedding-type learned_absolute", {"position_embedding": "learned"}),
        ("--position-embedding-type absolute", {"position_embedding": "learned"}),
        ("--position-embedding-type none", {"position_embedding": "none"}),
        ("--no-position-embedding", {"position_embedding": "none"}),
        ("--position-embedding-type alibi", {"position_embedding": "alibi", "rotary_dim": 0}),
        (
            "--position-embedding-type rotary",
            {"position_embedding": "rotary", "rotary_dim": 4, "rotary_base": 1e4},
        ),
        (
            "--use-rotary-position-embeddings --no-position-embedding --rotary-percent 0.5",
            {"position_embedding": "rotary", "rotary_dim": 2, "rope_scaling": 1.0},
        ),
        (
            "--position-embedding-type rope --rotary-base 500000 --use-rope-scaling",
            {"rotary_base": 5e5, "rope_scaling": 8.0, "rotary_interpolation": 1.0},
        ),
        (
            "--position-embedding-type rope --rotary-seq-len-interpolation-factor 4",
            {"rotary_interpolation": 4.0},
        ),
        # What has no meaning makes no difference between two plans.
        ("--rotary-base 7 --rope-scaling-factor 3", {"rotary_base": 0.0, "rope_scaling": 1.0}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("--window-size 3", {"window": 4}),
        ("--window-size 3,0", {"window": 4}),
        ("--window-size (0,0)", {"window": 1}),
        ("--window-size -1", {"window": 0}),
        ("--normalization RMSNorm", {"normalization": "RMSNorm", "norm_epsilon": 1e-5}),
        ("--norm-epsilon 1e-6 --apply-layernorm-1p", {"norm_epsilon": 1e-6, "layernorm_1p": True}),
        ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--embed-layernorm --qk-layernorm", {"embed_layernorm": True, "qk_layernorm": True}),
        ("--apply-residual-connection-post-layernorm", {"residual_after_norm": True}),
        ("--parallel-residual", {"parallel_residual": True}),
        ("--use-parallel-residual", {"parallel_residual": True}),
        ("", {"activation": "gelu_tanh"}),
        ("--openai-gelu --gelu tanh", {"activation": "gelu_tanh"}),
        ("--gelu erf", {"activation": "gelu_erf"}),
        ("--onnx-safe True", {"activation": "gelu_erf"}),
        ("--onnx-safe False", {"activation": "gelu_tanh"}),
        (
            "--position-embedding-type rotary --use-rope-scaling --rope-scaling-type yarn "
            "--rope-scaling-factor 4 --rope-original-max-position-embeddings 64",
            {
                "rope_scaling": 4.0,
                "rope_rule": "yarn",
                "rope_low_freq_factor": 1.0,
                "rope_high_freq_factor": 32.0,
                "rope_original_length": 64,
                "rope_attention_factor": 0.1 * math.log(4) + 1,
            },
        ),
        ("--squared-relu", {"activation": "squared_relu", "is_gated": False}),
        ("--relu", {"activation": "relu", "is_gated": False}),
        (
            "--attention-bias off",
            {"linear_bias": True, "qkv_bias": False, "attention_output_bias": False},
        ),
        (
            "--disable-bias-linear --attention-bias on",
            {"linear_bias": False, "qkv_bias": True, "attention_output_bias": True},
        ),
        ("--attention-bias on", {"qkv_bias": True, "attention_bias_apart": False}),
        (
            "--position-embedding-type rotary --use-rope-scaling --rope-low-freq-factor 2 "
            "--rope-high-freq-factor 5 --rope-original-max-position-embeddings 64",
            {
                "rope_scaling": 8.0,
                "rope_low_freq_factor": 2.0,
                "rope_high_freq_factor": 5.0,
                "rope_original_length": 64,
            },
        ),
        ("--swiglu", {"activation": "swiglu", "is_gated": True, "ffn_hidden_size": 32}),
        ("--glu-activation geglu", {"activation": "geglu", "is_gated": True}),
        ("--glu-activation geglu_tanh", {"activation": "geglu_tanh", "is_gated": True}),
        ("--window-size 3,0 --window-attn-skip-freq 2", {"full_attention_layers": (2,)}),
        ("--window-size 3,0 --window-attn-skip-freq [0]+[1]", {"full_attention_layers": (1,)}),
        ("--window-size 3,0 --window-attn-skip-freq [1,1]", {"full_attention_layers": ()}),
        ("--scale-embedding", {"scaled_embedding": True}),
        ("--sandwich-norm", {"sandwich_norm": True}),
        ("--query-pre-attn-scalar 16", {"query_scalar": 16.0, "attention_scale": 0.25}),
        # Four features per head.
        ("--query-pre-attn-scalar 4", {"query_scalar": 0.0, "attention_scale": 0.5}),
        ("--attn-logit-softcapping 50", {"attention_softcap": 50.0, "logit_softcap": 0.0}),
        ("--final-logit-softcapping 30", {"attention_softcap": 0.0, "logit_softcap": 30.0}),
        (
            "--position-embedding-type rope --window-size 3 --rope-local-base-freq 7",
            {"rotary_local_base": 7.0, "rotary_base": 10000.0},
        ),
        ("--swiglu --glu-activation swiglu", {"activation": "swiglu"}),
        (
            "--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1",
            {"activation": "quick_geglu", "glu_clamp": 7.0, "glu_offset": 1.0, "is_gated": True},
        ),
        ("--softmax-type learnable", {"softmax_type": "learnable"}),
        ("--disable-bias-linear", {"linear_bias": False, "qkv_bias": False}),
        ("--disable-bias-linear --add-qkv-bias", {"linear_bias": False, "qkv_bias": True}),
        ("--untie-embeddings-and-output-weights", {"tied_embeddings": False}),
        ("--fp32-residual-connection", {"fp32_residual": True}),
        ("--init-method-xavier-uniform", {"init": "xavier_uniform"}),
        ("--no-query-key-layer-scaling", {"query_key_layer_scaling": False}),
    ],
)
def test_every_option_reaches_the_network(flags, decided):
    spec = tiny_plan(*flags.split()).model
    model = flat(spec) | {
        "is_gated": spec.mlp.is_gated,
        "attention_output_bias": spec.attention_output_bias,
        "attention_scale": spec.attention.scale,
    }
    assert {name: model[name] for name in decided} == decided


def test_sizes_that_are_said_are_kept():
    flags = "--ffn-hidden-size 12 --kv-channels 5 --max-position-embeddings 9 --hidden-size 7"
    model = tiny_plan(*flags.split()).model
    assert (
        model.mlp.ffn_hidden_size,
        model.attention.head_dim,
        model.positions.max_position_embeddings,
    ) == (
        12,
        5,
        9,
    )


@given(st.integers(1, 300_000), st.integers(1, 256), st.integers(1, 16))
def test_the_vocabulary_is_padded_to_the_next_multiple(vocab_size, divisible_by, tensor):
    padded = padded_vocab_size(vocab_size, divisible_by=divisible_by, tensor=tensor)
    assert padded % (divisible_by * tensor) == 0
    assert vocab_size <= padded < vocab_size + divisible_by * tensor


@pytest.mark.parametrize(
    ("vocab_size", "tensor", "padded"), [(50257, 1, 50304), (50257, 8, 51200), (50304, 1, 50304)]
)
def test_the_padded_sizes_of_gpt_2(vocab_size, tensor, padded):
    assert padded_vocab_size(vocab_size, divisible_by=128, tensor=tensor) == padded


def test_the_padded_size_can_be_said():
    assert tiny_plan("--pad-vocab-size-to", "20").model.vocabulary.padded_vocab_size == 20
    assert tiny_plan().model.vocabulary.padded_vocab_size == 12


def test_a_padded_size_that_ranks_do_not_divide_is_rounded_up():
    flags = ["--pad-vocab-size-to", "13", "--make-vocab-size-divisible-by", "1"]
    alone = tiny_plan(*flags)
    divided = tiny_plan(*flags, "--tensor-model-parallel-size", "2", world_size=2)
    assert (
        alone.model.vocabulary.padded_vocab_size,
        divided.model.vocabulary.padded_vocab_size,
    ) == (13, 14)
    output = "--pad-vocab-size-to 13 is rounded up to 14, which the tensor-parallel ranks divide"
    assert any(notice.startswith(output) for notice in divided.notices)
    assert not any("rounded" in notice for notice in alone.notices)


def test_rows_without_a_token_are_weights_when_the_flag_counts_them():
    model = tiny_plan("--true-vocab-size", "14").model
    assert (model.vocabulary.vocab_size, model.vocabulary.padded_vocab_size) == (14, 16)


def test_padding_takes_part_in_the_softmax_where_there_is_some_and_the_flag_is_given():
    flag, even = "--padded-vocab-in-softmax", ["--make-vocab-size-divisible-by", "1"]
    for flags, counts in (
        ([], False),
        ([flag], True),
        ([flag, "True"], True),
        ([flag, "False"], False),
        ([flag, *even], False),
    ):
        assert tiny_plan(*flags).model.vocabulary.padded_vocab_in_softmax is counts, flags


def test_flops_of_a_plain_gpt_are_those_of_the_paper():
    changes = {"num_attention_heads": 16, "head_dim": 64, "ffn_hidden_size": 4096}
    sizes = {"num_layers": 24, "hidden_size": 1024, "seq_length": 512, "padded_vocab_size": 51200}
    s, h, layers, v = 512, 1024, 24, 51200
    expected = 96 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    spec = tiny_spec(**sizes, **changes)
    assert spec.flops_per_sample(recompute=ALL) == pytest.approx(expected, rel=1e-12)
    # Without recomputation the layers take three passes of four; the head always takes three.
    head = 6 * s * h * v
    expected = head + (expected - head) * 3 / 4
    assert spec.flops_per_sample(recompute=NOTHING) == pytest.approx(expected, rel=1e-12)
    # Selective recomputation takes attention, s of s + 6 h, a fourth time; block a part of layers.
    once = (expected - head) / 3
    selective, half = replace(NOTHING, granularity="selective"), replace(ALL, share=0.5)
    found = spec.flops_per_sample(recompute=selective)
    assert found == pytest.approx(expected + once * s / (s + 6 * h), rel=1e-12)
    assert spec.flops_per_sample(recompute=half) == pytest.approx(expected + once / 2, rel=1e-12)


def test_flops_of_every_option_are_those_of_its_products():
    """Tokens times 2 x rows x columns of every product, counted one by one."""
    spec = tiny_spec(
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=3,
        seq_length=10,
        window=4,
        activation="swiglu",
        ffn_hidden_size=20,
        tied_embeddings=False,
    )
    products = [8 * (4 + 2 + 2) * 3, 12 * 8, 8 * 2 * 20, 20 * 8, 4 * 3 * 4, 4 * 4 * 3]
    expected = 10 * 2 * (3 * 2 * sum(products) + 3 * 8 * 12)
    assert spec.flops_per_sample(recompute=NOTHING) == expected


def test_the_layout_is_the_rest_of_the_processes():
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    parallel = tiny_plan(*flags.split(), world_size=12).parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data) == (2, 2, 3)
    assert parallel.world_size == 12


@pytest.mark.parametrize(
    ("flag", "dtype", "is_mixed"), [("", "fp32", False), ("--bf16", "bf16", True)]
)
def test_precision(flag, dtype, is_mixed):
    precision = tiny_plan(*flag.split()).precision
    assert (precision.dtype, precision.is_mixed) == (dtype, is_mixed)


def test_tokenizer_arguments():
    printed = tiny_config("--vocab-file", "v", "--merge-file", "m").tokenizer
    files = {"vocab_file": "v", "merge_file": "m", "tokenizer_name_or_path": None}
    assert tokenizer_arguments(printed) == {"tokenizer_type": None, **files}
    assert tokenizer_arguments(printed, default="GPT2BPETokenizer") == {
        "tokenizer_type": "GPT2BPETokenizer",
        **files,
    }


def test_flags_of_another_type_of_tokenizer_are_left_out_with_a_notice():
    flags = ("--vocab-size", "9", "--tiktoken-pattern", "v2", "--tokenizer-type")
    null, tiktoken = (tiny_config(*flags, f"{kind}Tokenizer").tokenizer for kind in ("Null", "Tik"))
    assert without_idle_fields(null) == (
        replace(null, tiktoken_pattern=None),
        ["--tiktoken-pattern has no effect without --tokenizer-type TikTokenizer"],
    )
    assert without_idle_fields(tiktoken) == (tiktoken, [])


@pytest.mark.parametrize(
    ("line", "world_size", "notice"),
    [
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 4 --global-batch-size 8",
            2,
            "--expert-tensor-parallel-size 4 has no effect: the network has no experts "
            "(--num-experts)",
        ),
        (
            "--decoupled-lr 0.1 --lora-rank 2",
            1,
            "--decoupled-lr has no effect with --lora-rank: no embedding is trained",
        ),
        (
            "--apply-wd-to-qk-layernorm",
            1,
            "--apply-wd-to-qk-layernorm has no effect without --qk-layernorm",
        ),
    ],
)
def test_what_a_flag_does_not_do_beside_others_is_a_notice(line, world_size, notice):
    assert notice in tiny_plan(*line.split(), world_size=world_size).notices
    more = ("--qk-layernorm", "--num-experts", "2", "--expert-tensor-parallel-size", "1")
    more += ("--lora-rank", "0")
    assert notice not in tiny_plan(*line.split(), *more, world_size=world_size).notices


def test_a_run_that_ends_in_its_warmup_is_a_warning():
    decided = tiny_plan("--lr-warmup-iters", "10")
    (warning,) = [each for each in decided.notices if "--lr-warmup-iters" in each]
    assert "--train-iters 10 (20 samples)" in warning
    assert decided.schedule.warmup == 20 < decided.schedule.decay
    for flags in (["--lr-warmup-iters", "9"], ["--lr-warmup-iters", "9", "--lr-decay-iters", "12"]):
        assert not [each for each in tiny_plan(*flags).notices if "warmup" in each]
