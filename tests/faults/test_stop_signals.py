"""A stop signal at any moment: the run leaves a checkpoint and goes on, bit for bit."""

from functools import partial
from pathlib import Path
from signal import SIGTERM, SIGUSR1

from small_job import LAST, Job, is_same
from stop_signals import signal_in

from megatron.checkpointing.manifest import damage, iteration_of, published_tags, read_manifest
from megatron.common.errors import ExitCode
from megatron.training.loop.journal import read_journal

# Each goes on from the one before: moment, rank and signal, and where the run stands then.
STOPS = [
    ("forward", 1, SIGTERM, [], 1),
    ("loading", 0, SIGUSR1, [], 1),
    ("save", 1, SIGTERM, [], 2),
    ("evaluation", 0, SIGUSR1, [], 3),
    ("save", 0, SIGTERM, ["--async-save"], 4),
    ("data", 1, SIGUSR1, [], 5),
]


def evaluations(save: Path) -> dict[int, float]:
    """Return the loss that the journal tells of each evaluation."""
    records = read_journal(save)
    return {r["iteration"]: r["lm_loss"] for r in records if r["event"] == "evaluation"}


def test_a_signal_to_any_rank_at_any_moment_loses_nothing(job_of_two: Job, tmp_path: Path) -> None:
    save = tmp_path / "stopped"
    for moment, rank, number, more, stands in STOPS:
        ended = job_of_two.run(save, *more, setup=partial(signal_in, moment, rank, number))
        output = f"{moment}:\n" + "\n".join(ended.outputs)
        assert ended.codes == [ExitCode.RESUMABLE] * 2, output
        newest = published_tags(save)[0]
        assert iteration_of(newest) == stands, output
        assert damage(save / newest, read_manifest(save / newest).files) == []
        assert ("the evaluation at iteration 3 is interrupted" in output) == (
            moment == "evaluation"
        )
    job_of_two.run(save).succeeded()
    assert is_same(save, job_of_two.save)
    # What was left is not made up for, and what follows it is that of the calm run.
    calm = evaluations(job_of_two.save)
    assert set(calm) == {3, LAST}
    assert evaluations(save) == {LAST: calm[LAST]}
