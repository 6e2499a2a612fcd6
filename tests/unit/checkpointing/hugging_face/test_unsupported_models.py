"""Networks and configs that the other side cannot express are refused."""

import json

import pytest
import torch
from architectures import EXPERTS, GEMMAS, LLAMA, SHARED, SIGMOID, SIZES, THEIRS, tool
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.hugging_face.families.registry import all_families, family_of
from megatron.common.errors import CheckpointError

_LOCAL_STRETCHED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


def test_options_without_a_flag_are_refused(group, tmp_path):
    for number, (case, changes, message) in enumerate(
        [
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx … True"),
            ("gemma", {"use_bidirectional_attention": True}, "bidirectional_attention … True"),
            ("gemma 3", {"use_bidirectional_attention": True}, "bidirectional_attention … True"),
            ("gemma 3", {"attn_logit_softcapping": 5.0}, "5.0 … --attn-logit-softcapping"),
            ("gemma 3", {"rope_parameters": _LOCAL_STRETCHED}, "flag … 'factor': 2.0 … window"),
            ("qwen2-moe", {"use_sliding_window": True}, "use_sliding_window"),
            ("deepseek-moe", {"norm_topk_prob": False}, "norm_topk_prob … False"),
            ("gpt2", {"activation_function": "silu"}, "activation silu … gelu"),
            (
                "llama",
                {
                    "rope_parameters": {
                        "rope_type": "longrope",
                        "short_factor": [1.0] * 4,
                        "long_factor": [2.0] * 4,
                    }
                },
                "longrope … max_position_embeddings are 2048 and 2048",
            ),
            (
                "llama",
                {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
                "rotary … proportional … known … longrope",
            ),
        ]
    ):
        config = THEIRS[case].to_dict() | changes
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        torch.save({}, folder / "pytorch_model.bin")
        with problem(message, CheckpointError):
            tool("from_hf", "--load", folder, "--save", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--qk-layernorm", "GPT2LMHeadModel … qk_layernorm … True … --qk-layernorm"),
        ("--final-logit-softcapping 5", "logit_softcap … 5.0 … --final-logit-softcapping"),
        (
            f"{LLAMA} --swiglu --attention-bias on --rotary-percent 0.5",
            "rotary_dim … 2 … 4 … --rotary-percent",
        ),
        (
            f"{EXPERTS} --qk-layernorm --expert-interval 1 --mlp-type residual --moe-grouped-gemm",
            "Qwen3MoeForCausalLM … residual_experts … True … --mlp-type",
        ),
        (
            f"{EXPERTS} --qk-layernorm {SIGMOID} {SHARED} 50",
            "Dots1ForCausalLM … shared_expert_ffn_hidden_size … 50 … 40",
        ),
        (
            f"{EXPERTS} --moe-grouped-gemm --moe-router-topk 1",
            "MixtralForCausalLM … router_normalises … --moe-router-pre-softmax",
        ),
        ("--num-experts 2", "num_experts … (1, 2) … () … --num-experts"),
    ],
)
def test_a_network_that_no_architecture_expresses_is_refused(flags, message):
    with problem(message, CheckpointError):
        family_of(tiny_plan(*SIZES.split(), *flags.split()).model)


def test_gemma_3_does_not_stretch_positions_in_the_window():
    flags = f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm --window-size 5,0"
    stretched = f"{flags} --rotary-seq-len-interpolation-factor 2"
    with problem("rotary_local_base is 0.0 … 10000.0 … --rotary-local-base", CheckpointError):
        family_of(tiny_plan(*SIZES.split(), *stretched.split()).model, "gemma3_text")


def test_only_gpt_neox_has_parallel_residuals():
    spec = tiny_plan(*SIZES.split(), "--parallel-residual").model
    problems = {each.model_type: "\n".join(each.problems(spec)) for each in all_families()}
    refused = {name for name, why in problems.items() if "(--parallel-residual)" in why}
    assert refused == problems.keys() - {"gpt_neox"}
