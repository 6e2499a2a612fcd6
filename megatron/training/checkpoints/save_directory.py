"""Write access to --save: one run at a time, and only the run whose checkpoints are there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron.checkpointing.lock import hold_lock
from megatron.checkpointing.manifest import published_tags
from megatron.checkpointing.remote import published_at_url
from megatron.common.errors import WrongCheckpointError
from megatron.config.plan.plan import Plan
from megatron.config.run.checkpoint import replacement_problems
from megatron.training.loop.collectives import from_rank_0


@contextmanager
def sole_writer(plan: Plan) -> Iterator[None]:
    """Keep other runs from writing to --save inside the `with` block. For all ranks, in step.

    Raises:
        CheckpointError: another run writes there.
    """
    with ExitStack() as stack:
        if plan.checkpoint.save:
            directory = Path(plan.checkpoint.save)
            from_rank_0(lambda: stack.enter_context(hold_lock(directory)))
        yield


def require_own(plan: Plan) -> None:
    """Refuse a --save with checkpoints that this run does not resume from.

    Raises:
        WrongCheckpointError: it holds some.

    Communication: collective; rank 0 reads the disk.
    """
    requested = plan.checkpoint
    if not requested.save or requested.load == requested.save or plan.evaluation.only:
        return
    directory = Path(requested.save)
    tags = from_rank_0(lambda: published_tags(directory) or published_at_url(directory))
    for problem in replacement_problems(requested, tags):
        raise WrongCheckpointError(problem)
