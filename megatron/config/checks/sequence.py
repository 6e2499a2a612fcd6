"""A sequence divided over ranks: checks of its length, its heads, its samples and its kernels."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.common.registry import ATTENTIONS
from megatron.config.checks.start import Start
from megatron.config.network.model_resolution import num_query_groups_of
from megatron.config.parallelism.layout import (
    ULYSSES,
    context_problems,
    padded_length,
    sequence_parts,
    sequence_size,
    uses_ring,
)


def sequence_problems(start: Start) -> Iterator[str]:
    """Yield every reason why the sequence cannot be divided."""
    parallel, model = start.config.parallel, start.config.model
    seq_length, takes_ring = model.seq_length, _takes_ring(start)
    tensor, sequence = parallel.tensor_model_parallel_size, sequence_size(parallel)
    divides = parallel.sequence_parallel and tensor > 1
    yield from context_problems(parallel)
    if divides and seq_length % tensor:
        yield (
            f"--sequence-parallel: --seq-length {seq_length} is not a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )
    elif divides and uses_ring(parallel) and seq_length % sequence_parts(parallel):
        yield (
            f"--sequence-parallel with --context-parallel-size {sequence}: --seq-length {seq_length} is "
            f"not a multiple of {sequence_parts(parallel)}, which both can divide"
        )
    if sequence <= 1 or uses_ring(parallel):
        return
    flag, ring = f"--ds-sequence-parallel-size {sequence}", f"--context-parallel-size {sequence}"
    if parallel.context_parallel_size > 1:
        flag = f"--context-parallel-size {sequence} --cp-comm-type {ULYSSES}"
    if seq_length % sequence:
        yield f"{flag}: --seq-length {seq_length} is not a multiple of it"
    for name, heads in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", num_query_groups_of(model)),
    ):
        if heads % (tensor * sequence):
            yield (
                f"{flag}: {name} {heads} is not a multiple of {tensor * sequence} "
                f"(--tensor-model-parallel-size {tensor} * {sequence}); in attention every rank "
                "takes full heads: "
                + (
                    f"write {ring}, which divides none"
                    if takes_ring
                    else "take fewer ranks for a sample"
                )
            )
            break
    if parallel.sequence_parallel:
        yield (
            f"{flag} and --sequence-parallel both divide the sequence: take one of them out"
            + (f", or write {ring}" if takes_ring else "")
        )


def _takes_ring(start: Start) -> bool:
    """Whether the network can be trained with ring attention."""
    config = start.config
    ring = replace(
        config.parallel, context_parallel_size=2, cp_comm_type=None, ds_sequence_parallel_size=1
    )
    if start.has_experts and padded_length(ring, config.model.seq_length) > config.model.seq_length:
        return False
    problems = start.network.problems(replace(config, parallel=ring))
    return not any("--context-parallel-size" in each for each in problems)


def padding_problems(start: Start) -> Iterator[str]:
    """Yield why samples cannot be padded to a length that ranks divide."""
    parallel, length = start.config.parallel, start.config.model.seq_length
    if start.objective != "gpt" and padded_length(parallel, length) > length:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size}: --seq-length {length} is not "
            f"a multiple of 2 * {parallel.context_parallel_size}; samples of the objective "
            f"{start.objective} cannot be padded"
        )


def ring_problems(start: Start) -> Iterator[str]:
    """Yield the implementations that ring attention does not accept: it computes blocks itself."""
    kernels, parallel = start.config.kernels, start.config.parallel
    if not uses_ring(parallel):
        return
    flag = f"--context-parallel-size {parallel.context_parallel_size}"
    attention = kernels.attention_impl
    if attention == "flex" or ATTENTIONS.is_own(attention):
        yield (
            f"{flag}: ring attention has no blocks by --attention-impl {attention}: leave that out, or "
            "write --cp-comm-type a2a"
        )
    if kernels.compile:
        yield f"{flag}: --compile does not compile ring attention: leave one of the two out"
