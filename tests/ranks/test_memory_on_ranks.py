"""What the planner expects in memory, against the tensors that a step has, layout by layout."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from memory_checks import BOTH, agrees
from ranks import outcomes_on_ranks, require_passed
from tiny import GEMMA, LATENT

FULL = ("--recompute-granularity", "full", "--recompute-method")


def replicas(rank: int) -> None:
    agrees("--zero-stage", "0")


def selective(rank: int) -> None:
    agrees("--recompute-activations", *BOTH)


def uniform(rank: int) -> None:
    agrees(*FULL, "uniform", "--recompute-num-layers", "2", "--zero-stage", "1")


def block(rank: int) -> None:
    agrees(*FULL, "block", "--recompute-num-layers", "3", "--zero-stage", "2")


def bf16_at_stage_1(rank: int) -> None:
    agrees("--bf16", "--zero-stage", "1", "--position-embedding-type", "alibi")


def bf16_at_stage_2(rank: int) -> None:
    agrees("--bf16", "--zero-stage", "2", "--attention-impl", "fused-softmax")


def bf16_at_stage_3(rank: int) -> None:
    agrees("--bf16", "--zero-stage", "3", "--embed-layernorm")


def tensor_parallel(rank: int) -> None:
    agrees("--tensor-model-parallel-size", "2", "--swiglu", "--qk-layernorm")


def gemma(rank: int) -> None:
    agrees(*GEMMA, *BOTH)


def sinks_and_clamped_gates(rank: int) -> None:
    flags = ("--quick-geglu", "--activation-func-clamp-value", "7", "--glu-linear-offset", "1")
    agrees("--softmax-type", "learnable", *flags)


WIDE_LATENTS = (
    *(*LATENT, "--q-lora-rank", "40", "--kv-lora-rank", "32", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "12"),
)


def latent_attention(rank: int) -> None:
    agrees(*WIDE_LATENTS, "--zero-stage", "1")


def latent_attention_of_tensor_ranks(rank: int) -> None:
    agrees(*WIDE_LATENTS, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16")


def divided_sequence(rank: int) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16")
    flags += ("--group-query-attention", "--num-query-groups", "2")
    agrees(*flags, "--untie-embeddings-and-output-weights")


def ulysses(rank: int) -> None:
    agrees("--ds-sequence-parallel-size", "2", "--normalization", "RMSNorm")


def ring(rank: int) -> None:
    flags = ("--group-query-attention", "--num-query-groups", "2", "--normalization", "RMSNorm")
    agrees("--context-parallel-size", "2", "--position-embedding-type", "rotary", *flags)


def ring_in_bf16(rank: int) -> None:
    agrees("--context-parallel-size", "2", "--bf16", "--reset-attention-mask", *BOTH)


def pipeline(rank: int) -> None:
    agrees("--pipeline-model-parallel-size", "2", *BOTH)


def pipeline_in_bf16(rank: int) -> None:
    agrees("--pipeline-model-parallel-size", "2", "--bf16", "--checkpoint-activations")


def zero_bubble_with_chunks(rank: int) -> None:
    flags = ("--num-virtual-stages-per-pipeline-rank", "2", "--checkpoint-activations")
    agrees("--pipeline-model-parallel-size", "2", "--enable-zbh1-pipeline", *flags)


CHECKS = [
    replicas,
    selective,
    uniform,
    block,
    bf16_at_stage_1,
    bf16_at_stage_2,
    bf16_at_stage_3,
    tensor_parallel,
    gemma,
    sinks_and_clamped_gates,
    latent_attention,
    latent_attention_of_tensor_ranks,
    divided_sequence,
    ulysses,
    ring,
    ring_in_bf16,
    pipeline,
    pipeline_in_bf16,
    zero_bubble_with_chunks,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_planner_expects_what_is_there(check, outcomes):
    require_passed(check, outcomes)
