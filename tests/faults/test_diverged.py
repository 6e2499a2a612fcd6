"""A run that diverges keeps its last good checkpoint, over restarts, and says how to go on from it."""

import json
import math
from functools import partial
from pathlib import Path
from signal import SIGTERM

from failing import has_no_finite_loss_from
from forked import steps
from small_job import LAST, Job

from megatron.checkpointing.manifest import published_tags
from megatron.common.errors import ExitCode
from megatron.training.process.failure import FAILURE

OVERRIDE = ["--override-opt_param-scheduler"]
DIVERGING = ["--lr", "1e30", *OVERRIDE]


def losses(save: Path) -> dict[int, float | None]:
    return {step["iteration"]: step["lm_loss"] for step in steps(save)}


def test_a_diverged_run_goes_on_from_its_last_good_checkpoint(job: Job, tmp_path: Path) -> None:
    save = tmp_path / "run"
    saves = ["--save-interval", "1", "--keep-last", "2", "--train-iters", "40"]
    saves += ["--lr-decay-iters", "40"]
    job.run(save, *saves, "--train-iters", "4").succeeded()
    assert published_tags(save) == ["global_step4", "global_step3"]
    for _ in range(2):
        ended = job.run(save, *saves, *DIVERGING)
        assert ended.codes == [ExitCode.FAILED]
        assert "--ckpt-step 4 resumes from the one before it" in ended.outputs[0]
        assert published_tags(save)[:2] == ["global_step5", "global_step4"]
    # With the rate of before, the weights of step 5 still give NaN, and the message says so.
    ended = job.run(save, *saves, *OVERRIDE)
    assert ended.codes == [ExitCode.FAILED]
    assert "no finite step has followed global_step5" in ended.outputs[0]
    assert "--ckpt-step 4" in json.loads((save / FAILURE).read_text())["message"]
    job.run(save, *saves, *OVERRIDE, "--ckpt-step", "4", "--train-iters", "8").succeeded()
    assert all(math.isfinite(loss or math.nan) for loss in losses(save).values())
    assert published_tags(save)[0] == "global_step8"


def test_a_run_that_is_stopped_in_a_streak_of_nan_saves_nothing_of_it(
    keeping_job: Job, tmp_path: Path
) -> None:
    save = tmp_path / "stopped"
    struck = partial(has_no_finite_loss_from, 4, SIGTERM)
    ended = keeping_job.run(save, setup=struck)
    assert ended.codes == [ExitCode.RESUMABLE]
    output = "without a save: the loss or gradient of iteration 5 is not finite; the same command "
    assert output + "resumes from global_step2" in ended.outputs[0]
    assert published_tags(save) == ["global_step2"]
    # A run cannot be finished with a loss that is NaN.
    ended = keeping_job.run(save, setup=partial(has_no_finite_loss_from, 5, None))
    assert ended.codes == [ExitCode.FAILED]
    assert f"error: training is done after {LAST} iterations, without a save" in ended.outputs[0]
    assert published_tags(save) == ["global_step4", "global_step2"]
    keeping_job.run(save).succeeded()
    assert losses(save) == losses(keeping_job.save)
