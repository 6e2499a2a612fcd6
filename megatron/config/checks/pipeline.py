"""Pipelines: checks of their schedules."""

from collections.abc import Iterator

from megatron.config.checks.start import Start
from megatron.config.parallelism.pipeline import chunks_of
from megatron.config.parsing.json_tree import value_at


def split_backward_problems(start: Start) -> Iterator[str]:
    """Yield why weight gradients cannot be computed in separate passes (zero bubble)."""
    config, parallel = start.config, start.config.parallel
    others = {
        "--compile": config.kernels.compile,
        "--fp8-format": config.precision.fp8_format is not None,
        "bf16.immediate_grad_update false in --deepspeed_config": config.precision.bf16
        and not value_at(start.deepspeed, "bf16.immediate_grad_update", True),
    }
    if not parallel.enable_zbh1_pipeline:
        return
    if parallel.pipeline_model_parallel_size < 2:
        yield (
            "--enable-zbh1-pipeline is a schedule of pipeline stages, and there is one: add "
            "--pipeline-model-parallel-size 2 or more, or leave it out"
        )
    for flag, is_given in others.items():
        if is_given:
            yield (
                f"--enable-zbh1-pipeline does not go with {flag}: weight gradients cannot be put off "
                "there; leave one of the two out"
            )


def interleaving_problems(start: Start) -> Iterator[str]:
    """Yield the batch sizes of a run that the interleaved schedule cannot take.

    With other numbers of micro-batches it would deadlock.
    """
    parallel, batch = start.config.parallel, start.steps.batch
    pipeline, chunks = parallel.pipeline_model_parallel_size, chunks_of(parallel, start.num_layers)
    if chunks == 1 or pipeline < 2 or not start.trains:
        return
    sizes = batch.sizes_from(start.done.samples)
    uneven = [size for size in sizes if batch.num_micro_batches(size) % pipeline]
    if uneven:
        unit = batch.micro_batch_size * batch.data_parallel_size * pipeline
        flags = "--global-batch-size and --rampup-batch-size"
        yield (
            f"the interleaved pipeline schedule ({chunks} chunks a stage) needs a number of "
            f"micro-batches that is a multiple of --pipeline-model-parallel-size {pipeline}, and a "
            f"global batch of {uneven[0]} samples has {batch.num_micro_batches(uneven[0])}: write "
            f"multiples of {unit} in {'--step-batch-size-schedule' if batch.size_schedule else flags}"
        )
