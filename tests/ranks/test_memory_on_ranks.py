"""What the planner expects in memory, against the tensors that a step has, layout by layout."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from engines import batches_of
from ranks import outcomes_on_ranks, require_passed
from tiny import GEMMA, tiny_plan

from megatron.config.plan import Plan
from megatron.diagnostics.live_tensors import LiveTensors
from megatron.engine.deepspeed import distributed
from megatron.extensions.bert.objective import BERT, bert_batch
from megatron.extensions.t5.flags import DecoderSpec
from megatron.extensions.t5.objective import T5, t5_batch
from megatron.objectives.gpt import GPT
from megatron.objectives.objective import Objective
from megatron.planner.memory import memory_of_stages
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.process_groups import Groups
from megatron.training.setup import build_engine, build_process_groups, choose

SIZES = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--make-vocab-size-divisible-by", "256"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--zero-reduce-bucket-size", "1000"),
]
FULL = ("--recompute-granularity", "full", "--recompute-method")
BOTH = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def encoder_batches(plan: Plan, groups: Groups) -> Iterator[Batch]:
    """Yield micro-batches of full samples for a BERT or T5."""
    spec, samples = plan.model, plan.batch.micro_batch_size
    ones = partial(torch.ones, dtype=torch.int64)
    row, width = ones(samples, spec.seq_length), spec.part(DecoderSpec).decoder_seq_length
    if spec.architecture == "bert":
        parts = {"text": row, "types": row, "labels": row, "loss_mask": row, "padding_mask": row}
        flags = dict.fromkeys(("is_random", "truncated"), row[:, 0])
        return iter(lambda: bert_batch(**parts, **flags), None)
    lengths = {"enc_length": spec.seq_length * row[:, 0], "dec_length": width * row[:, 0]}
    own = dict.fromkeys(("text_dec", "labels", "loss_mask"), ones(samples, width))
    return iter(lambda: t5_batch(text_enc=row, truncated=row[:, 0], **own, **lengths), None)


OBJECTIVES: dict[str, tuple[Objective, Callable[[Plan, Groups], Iterator[Batch]]]] = {
    "gpt": (GPT(), batches_of),
    "bert": (BERT(), encoder_batches),
    "t5": (T5(), encoder_batches),
}


def agrees(*flags: str, objective: str = "gpt") -> None:
    """Compare at the end of the last forward pass of the second step."""
    distributed.start("gloo")
    ranks = dist.get_world_size()
    sizes = (*SIZES, "--global-batch-size", str(4 * ranks))
    plan = tiny_plan(*sizes, *flags, world_size=ranks, objective=objective)
    trained, batches_for = OBJECTIVES[objective]
    groups = build_process_groups(plan)
    kernels, _ = choose(plan, torch.device("cpu"))
    fullest = 0
    with LiveTensors() as made:
        engine = build_engine(plan, groups, trained, kernels)
        batches = batches_for(plan, groups)
        engine.train_batch(batches)
        gc.collect()

        def look(*_: object) -> None:
            nonlocal fullest
            fullest = max(fullest, made.alive_bytes())

        engine.module.register_forward_hook(look)
        engine.train_batch(batches)
    expected = memory_of_stages(plan, device="cpu")[groups.stage]
    assert expected.kept == pytest.approx(fullest, rel=0.05), (expected, fullest)


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


T5_SIZES = ("--decoder-seq-length", "32", "--decoder-num-layers", "3")


def bert(rank: int) -> None:
    agrees("--zero-stage", "1", objective="bert")


def bert_with_tensor_parallelism(rank: int) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", *BOTH)
    agrees(*flags, objective="bert")


def bert_in_stages(rank: int) -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--checkpoint-activations")
    agrees(*flags, objective="bert")


def t5(rank: int) -> None:
    agrees(*T5_SIZES, "--zero-stage", "1", objective="t5")


def t5_with_tensor_parallelism(rank: int) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", *BOTH)
    agrees(*T5_SIZES, *flags, objective="t5")


def t5_in_stages(rank: int) -> None:
    agrees(*T5_SIZES, "--pipeline-model-parallel-size", "2", objective="t5")


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
    divided_sequence,
    ulysses,
    ring,
    ring_in_bf16,
    pipeline,
    pipeline_in_bf16,
    zero_bubble_with_chunks,
    bert,
    bert_with_tensor_parallelism,
    bert_in_stages,
    t5,
    t5_with_tensor_parallelism,
    t5_in_stages,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_planner_expects_what_is_there(check, outcomes):
    require_passed(check, outcomes)
