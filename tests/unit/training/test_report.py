"""Log lines and the journal's records of a run."""

import json
import math

import pytest
from tiny import tiny_plan

from megatron.training.journal import Journal, read_journal
from megatron.training.loop import StepResult
from megatron.training.report import Report, memory_line
from megatron.training.state import TrainState

PLAN = tiny_plan("--log-interval", "3", "--train-iters", "30", "--global-batch-size", "4")


def step(loss, *, seconds=2.0, grad_norm=1.5, skipped=False, batch_size=4):
    return StepResult(
        loss=loss,
        lr=0.01 * loss if math.isfinite(loss) else 0.5,
        batch_size=batch_size,
        seconds=seconds,
        grad_norm=grad_norm,
        loss_scale=2.0,
        skipped=skipped,
    )


def report_of(steps, tmp_path, plan=PLAN):
    """Return the records of `steps`, one step after the other from the first on."""
    report, state = Report(plan, Journal(tmp_path)), TrainState()
    for result in steps:
        state.iteration += 1
        state.samples += result.batch_size
        state.tokens += result.batch_size * 6
        report.after_step(state, result)
    return [*read_journal(tmp_path)] if (tmp_path / "journal.jsonl").exists() else []


def test_nothing_is_told_before_the_interval_is_full(tmp_path):
    assert report_of([step(1.0)] * 2, tmp_path) == []


def test_an_interval_is_told_as_means_and_counts(tmp_path):
    (record,) = report_of([step(1.0), step(2.0, seconds=4.0, skipped=True), step(6.0)], tmp_path)
    flops = 12 * PLAN.model.flops_per_sample(recompute=False)
    assert record == {
        "event": "train",
        "iteration": 3,
        "train_iters": 30,
        "consumed_samples": 12,
        "consumed_tokens": 72,
        "iteration_ms": pytest.approx(8000 / 3),
        "learning_rate": 0.06,
        "global_batch_size": 4,
        "lm_loss": 3.0,
        "loss_scale": 2.0,
        "grad_norm": 1.5,
        "skipped_iterations": 1,
        "nan_iterations": 0,
        "samples_per_second": 1.5,
        "tflops": pytest.approx(flops / 8e12),
        "eta_s": pytest.approx((120 - 12) / 1.5),
    }


def test_every_interval_begins_anew(tmp_path):
    records = report_of([step(1.0)] * 3 + [step(4.0, seconds=1.0)] * 3, tmp_path)
    assert [record["lm_loss"] for record in records] == [1.0, 4.0]
    assert [record["iteration_ms"] for record in records] == [2000.0, 1000.0]


def test_losses_that_are_no_numbers_are_counted_and_left_out_of_the_mean(tmp_path):
    (record,) = report_of([step(math.nan), step(4.0), step(math.inf)], tmp_path)
    assert (record["lm_loss"], record["nan_iterations"]) == (4.0, 2)


def test_an_interval_without_a_finite_loss_says_so(tmp_path):
    (record,) = report_of([step(math.nan)] * 3, tmp_path)
    assert (record["lm_loss"], record["nan_iterations"]) == (None, 3)


def test_a_growing_batch_is_counted_by_its_samples(tmp_path):
    sizes = [2, 2, 8]
    (record,) = report_of([step(1.0, batch_size=size) for size in sizes], tmp_path)
    assert (record["global_batch_size"], record["samples_per_second"]) == (8, 2.0)


def test_flops_are_per_process(tmp_path):
    flags = ["--log-interval", "3", "--train-iters", "30", "--checkpoint-activations"]
    plan = tiny_plan(*flags, world_size=4)
    (record,) = report_of([step(1.0)] * 3, tmp_path, plan)
    flops = 12 * plan.model.flops_per_sample(recompute=True)
    assert record["tflops"] == pytest.approx(flops / (6 * 4 * 1e12))


def test_the_line_goes_to_the_log_and_memory_once(tmp_path, told):
    report_of([step(1.0)] * 6, tmp_path)
    assert [line[:18] for line in told] == [
        " iteration        ",
        "[Rank 0] (after 3 ",
        " iteration        ",
    ]
    assert "loss scale" not in told[0]


def test_memory_is_told_in_mib():
    assert memory_line(7).startswith("[Rank 0] (after 7 iterations) memory (MB) | max resident: ")


def test_without_a_journal_nothing_is_written():
    report, state = Report(PLAN, None), TrainState(iteration=3, samples=4)
    report.after_step(state, step(1.0))


def test_records_are_appended_in_order(tmp_path):
    Journal(tmp_path / "new").write("train", {"iteration": 1})
    Journal(tmp_path / "new").write("evaluation", {"set": "valid"})
    assert [*read_journal(tmp_path / "new")] == [
        {"event": "train", "iteration": 1},
        {"event": "evaluation", "set": "valid"},
    ]
    assert len((tmp_path / "new" / "journal.jsonl").read_text().splitlines()) == 2


def test_every_line_is_json_for_strict_readers_too(tmp_path):
    report_of([step(math.nan)] * 3, tmp_path)
    (line,) = (tmp_path / "journal.jsonl").read_text().splitlines()
    foreign = []
    json.loads(line, parse_constant=foreign.append)
    assert foreign == []
