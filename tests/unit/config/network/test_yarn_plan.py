"""YaRN in Megatron-LM's spelling: the same network as --use-rope-scaling, and what does not go together."""

import math

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import ConfigError

THEIRS = "--position-embedding-type yarn --rotary-scaling-factor 32"
LENGTH = "--yarn-original-max-position-embeddings 64"
OURS = (
    "--position-embedding-type rope --use-rope-scaling --rope-scaling-type yarn "
    "--rope-scaling-factor 32 --rope-original-max-position-embeddings 64"
)


def model(line):
    return tiny_plan(*line.split()).model


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("", ""),
        ("--mscale 1 --mscale-all-dim 0 --yarn-correction-range-round-to-int", ""),
        (
            "--yarn-beta-fast 16 --yarn-beta-slow 2 --no-yarn-correction-range-round-to-int",
            "--rope-beta-fast 16 --rope-beta-slow 2 --no-rope-truncation",
        ),
    ],
)
def test_it_is_rope_scaling(theirs, ours):
    assert model(f"{THEIRS} {LENGTH} {theirs}") == model(f"{OURS} {ours}")


def test_scales_multiply_the_tables_and_no_scores():
    spec = model(f"{THEIRS} {LENGTH} --mscale 0.5 --mscale-all-dim 0.25")
    expected = (0.05 * math.log(32) + 1) / (0.025 * math.log(32) + 1)
    assert spec.positions.rope_attention_factor == pytest.approx(expected)
    assert spec.attention.query_scalar == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (THEIRS, "--rope-scaling-type yarn … --rope-original-max-position-embeddings"),
        (
            f"--position-embedding-type yarn {LENGTH}",
            "--rotary-scaling-factor 1.0 must be more than 1",
        ),
        (f"{THEIRS} {LENGTH} --rotary-percent 0.5", "--rotary-percent 0.5 … write rope there"),
        (f"{THEIRS} {LENGTH} --rope-scaling-factor 4", "--rope-scaling-factor 4 … yarn"),
        (f"{THEIRS} {LENGTH} --use-rope-scaling", "--use-rope-scaling … yarn"),
        (f"{THEIRS} {LENGTH} --multi-latent-attention", "--multi-latent-attention … rope there"),
        ("--rotary-scaling-factor 32", "--rotary-scaling-factor … --multi-latent-attention"),
    ],
)
def test_what_does_not_go_together_is_refused(line, words):
    with problem(words, ConfigError):
        model(line)
