"""Flags of multi-head latent attention: the network they make, and what does not go together."""

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import ConfigError
from megatron.config.network.latent import LatentSpec

MLA = (
    "--multi-latent-attention --qk-layernorm --position-embedding-type rope --kv-lora-rank 8 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
)
STRETCHED = f"{MLA} --rotary-scaling-factor 4"


def plan(line):
    return tiny_plan(*line.split())


def test_flags_make_the_network():
    spec = plan(f"{STRETCHED} --mscale-all-dim 1").model
    latent = spec.part(LatentSpec)
    assert (latent.kv_lora_rank, latent.q_lora_rank, latent.v_head_dim) == (8, 0, 6)
    assert (spec.attention.head_dim, spec.positions.rotary_dim) == (12, 4)
    assert (spec.positions.rope_rule, spec.positions.rope_scaling) == ("yarn", 4)
    assert spec.attention.query_scalar == pytest.approx(12 / (0.1 * 1.3862943611 + 1) ** 4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--kv-lora-rank 8", "--kv-lora-rank … --multi-latent-attention"),
        (MLA.replace("rope", "learned_absolute"), "--position-embedding-type rope"),
        (f"{MLA} --qk-pos-emb-head-dim 3", "--qk-pos-emb-head-dim 3 … odd"),
        (f"{MLA} --kv-channels 5", "--kv-channels 5 … --qk-head-dim"),
        (f"{MLA} --group-query-attention", "--group-query-attention … --multi-latent-attention"),
        (f"{MLA} --mscale 0.5", "--mscale 0.5 … YaRN"),
        (
            f"{STRETCHED} --rope-scaling-factor 16",
            "--rotary-scaling-factor 4 … --rope-scaling-factor 16 … one of them",
        ),
        (f"{STRETCHED} --use-rope-scaling", "--rotary-scaling-factor 4 … --use-rope-scaling"),
        (f"{STRETCHED} --rope-type rope", "--rotary-scaling-factor 4 … --rope-type rope"),
        (
            f"{MLA} --rope-type yarn --use-rope-scaling",
            "--rope-type yarn … llama3 … --rope-scaling-type yarn",
        ),
        (
            f"{STRETCHED} --mscale 0.5 --rope-attention-factor 2",
            "--mscale 0.5 … --rope-attention-factor 2 … one of them",
        ),
        (f"{MLA} --lora-rank 2 --lora-target-modules query_key_value", "no layer query_key_value"),
    ],
)
def test_what_does_not_go_together_is_refused(line, words):
    with problem(words, ConfigError):
        plan(line)
