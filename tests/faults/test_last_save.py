"""The last save comes before the evaluations at the end of training, whose errors then lose no step."""

from pathlib import Path

from small_job import LAST, Job

SAVED = f"saving checkpoint at iteration {LAST:7d}"
VALIDATED, TESTED = (f"at the end of training for {name} data |" for name in ("val", "test"))


def test_the_last_save_precedes_the_last_evaluations(job_of_two: Job, tmp_path: Path) -> None:
    order = [SAVED, VALIDATED, TESTED]
    for interval in ("4", str(LAST)):
        flags = ("--split", "60,20,20", "--save-interval", interval)
        ended = job_of_two.run(tmp_path / interval, *flags).succeeded()
        output = "\n".join(ended.outputs)
        assert sorted(order, key=output.index) == order, output
        assert [output.count(line) for line in order] == [1, 1, 1]
