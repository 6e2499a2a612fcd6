"""Log lines and the journal's records of a run."""

import io
import json
import math
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.train_state import TrainState
from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.planner.memory import memory_of_stages
from megatron.training.loop.journal import Journal, read_journal
from megatron.training.loop.loop import StepResult
from megatron.training.telemetry.forecast import forecast_line
from megatron.training.telemetry.report import PluginMetrics, Report, memory_line, peak_flops_of

PLAN = tiny_plan("--log-interval", "3", "--train-iters", "30", "--global-batch-size", "4")


def step(loss, *, seconds=2.0, grad_norm=1.5, skipped=False, batch_size=4, **more):
    return StepResult(
        loss=loss,
        lr=0.01 * loss if math.isfinite(loss) else 0.5,
        batch_size=batch_size,
        seconds=seconds,
        grad_norm=grad_norm,
        loss_scale=2.0,
        skipped=skipped,
        **({"seq_length": 6} | more),
    )


def report_of(steps, tmp_path, plan=PLAN, **words):
    """Return the records of `steps`, one step after the other from the first on."""
    report, state = Report(plan, Journal(tmp_path), **words), TrainState()
    for result in steps:
        state.iteration += 1
        state.samples += result.batch_size
        state.tokens += result.batch_size * 6
        report.after_step(state, result)
    return [*read_journal(tmp_path)] if (tmp_path / "journal.jsonl").exists() else []


@pytest.mark.parametrize(
    ("wanted", "is_terminal", "is_compact"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("full", True, False),
        ("compact", False, True),
    ],
)
def test_the_log_line_is_compact_on_a_terminal(tmp_path, messages, wanted, is_terminal, is_compact):
    stdout = io.StringIO()
    stdout.isatty = lambda: is_terminal
    plan = replace(PLAN, logging=replace(PLAN.logging, format=wanted))
    with redirect_stdout(stdout):
        report_of([step(1.0)] * 3, tmp_path, plan)
    assert messages[0].startswith("3/30 | loss 1.0000") == is_compact
    assert ("consumed samples:" in messages[0]) != is_compact


def test_nothing_is_told_before_the_interval_is_full(tmp_path):
    assert report_of([step(1.0)] * 2, tmp_path) == []


def test_an_interval_is_told_as_means_and_counts(tmp_path):
    (record,) = report_of([step(1.0), step(2.0, seconds=4.0, skipped=True), step(6.0)], tmp_path)
    flops = 12 * PLAN.model.flops_per_sample(recompute=PLAN.recompute)
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


def test_terms_of_a_loss_are_means_of_their_own(tmp_path, messages):
    steps = [
        step(3.0, measures={"lm loss": 2.5, "sop loss": 0.5}),
        step(2.0, measures={"lm loss": 1.5, "sop loss": math.nan}),
        step(2.5, measures={"lm loss": 2.0, "sop loss": 0.5}),
    ]
    (record,) = report_of(steps, tmp_path)
    assert (record["lm_loss"], record["sop_loss"]) == (2.0, 0.5)
    assert "lm loss: 2.000000E+00 | sop loss: 5.000000E-01 |" in messages[0]


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
    flops = 12 * plan.model.flops_per_sample(recompute=plan.recompute)
    assert record["tflops"] == pytest.approx(flops / (6 * 4 * 1e12))


def test_flops_are_those_of_the_length_that_samples_had(tmp_path):
    steps = [step(1.0, seq_length=length) for length in (2, 3, 6)]
    (record,) = report_of(steps, tmp_path)
    flops = sum(
        4 * replace(PLAN.model, seq_length=length).flops_per_sample(recompute=PLAN.recompute)
        for length in (2, 3, 6)
    )
    assert record["tflops"] == pytest.approx(flops / 6e12)


def test_utilisation_is_told_where_the_peak_of_a_device_is_known(tmp_path, messages):
    flags = ["--log-interval", "3", "--train-iters", "30", "--checkpoint-activations"]
    plan = tiny_plan(*flags, world_size=4)
    peak, steps = 2e6, [step(1.0, seq_length=length) for length in (2, 3, 6)]
    (record,) = report_of(steps, tmp_path / "known", plan, peak_flops=peak)
    model, hardware = (
        sum(4 * replace(plan.model, seq_length=n).flops_per_sample(recompute=r) for n in (2, 3, 6))
        / (6.0 * 4 * peak)
        for r in (NOTHING, plan.recompute)
    )
    assert (record["mfu"], record["hfu"]) == pytest.approx((model, hardware))
    assert record["hfu"] == pytest.approx(record["tflops"] * 1e12 / peak)
    assert f"| MFU: {model:.1%} | HFU: {hardware:.1%} |" in messages[0]
    adapted = tiny_plan(*flags[:4], "--lora-rank", "2")
    for other, name, peak in ((plan, "unknown", 0.0), (adapted, "adapters", 2e6)):
        (record,) = report_of(steps, tmp_path / name, other, peak_flops=peak)
        assert "mfu" not in record and "hfu" not in record


def test_the_peak_is_that_said_or_of_the_data_sheet_and_else_unknown(gpus):
    assert peak_flops_of(tiny_plan("--device-peak-tflops", "0.5")) == 0.5e12
    assert peak_flops_of(PLAN) == 0.0
    plan = tiny_plan("--bf16")
    for name, peak in (
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 0.0),
        ("NVIDIA GB200", 0.0),
    ):
        gpus(1, name=name, total_memory=80 * 2**30)
        assert peak_flops_of(plan) == peak


def test_what_is_left_takes_as_long_as_what_was_done_evaluations_included(tmp_path, clock):
    report, state = Report(PLAN, Journal(tmp_path)), TrainState(samples=8)
    report.before_step(state)
    state.samples, state.iteration = 20, 3
    clock.pass_time(60)
    report.after_step(state, step(1.0))
    (record,) = read_journal(tmp_path)
    # 12 samples in 60 seconds, of which the step took 2; 100 are left.
    assert record["eta_s"] == 100 * 5.0


def test_what_meters_measured_is_told_and_recorded(tmp_path, messages):
    measures = {
        "num zeros": 7.0,
        "params norm": 1.25,
        "curriculum seqlen": 16,
        "energy (kWh)": 0.5,
        "CO2 (kg)": 0.25,
        "time/forward-compute": 0.0125,
    }
    (record,) = report_of([step(1.0)] * 2 + [step(1.0, measures=measures)], tmp_path)
    assert (
        "| grad norm: 1.500 | num zeros: 7.0 | params norm: 1.250 | curriculum seqlen:    16 | number"
        in messages[0]
    )
    assert "| energy (kWh): 0.500000 | CO2 (kg): 0.250000 | done" in messages[0]
    assert messages[1] == "time (ms) | forward-compute: 12.50"
    recorded = ("num_zeros", "params_norm", "curriculum_seqlen", "energy_kwh", "co2_kg")
    assert [record[name] for name in recorded] == [*measures.values()][:5]
    assert record["time_forward_compute"] == 0.0125


def test_the_line_goes_to_the_log_and_memory_once(tmp_path, messages):
    report_of([step(1.0)] * 6, tmp_path)
    assert [line[:18] for line in messages] == [
        " iteration        ",
        "[Rank 0] (after 3 ",
        "[Rank 0] memory (M",
        " iteration        ",
    ]
    assert "loss scale" not in messages[0]


def test_memory_is_told_in_mib():
    assert memory_line(7).startswith("[Rank 0] (after 7 iterations) memory (MB) | max resident: ")


def test_without_a_journal_nothing_is_written():
    report, state = Report(PLAN, None), TrainState(iteration=3, samples=4)
    report.after_step(state, step(1.0))


def test_records_are_appended_in_order(tmp_path):
    evaluation = {"iteration": 1, "set": "valid", "lm_loss": 2.0, "ppl": 7.4}
    Journal(tmp_path / "new").write("train", {"iteration": 1})
    Journal(tmp_path / "new").write("evaluation", evaluation)
    assert [*read_journal(tmp_path / "new")] == [
        {"event": "train", "iteration": 1},
        {"event": "evaluation", **evaluation},
    ]
    assert len((tmp_path / "new" / "journal.jsonl").read_text().splitlines()) == 2


def test_every_line_is_json_for_strict_readers_too(tmp_path):
    report_of([step(math.nan)] * 3, tmp_path)
    (line,) = (tmp_path / "journal.jsonl").read_text().splitlines()
    foreign = []
    json.loads(line, parse_constant=foreign.append)
    assert foreign == []


def test_memory_that_was_expected_is_told_beside_what_is_taken():
    line = forecast_line(tiny_plan(), samples_per_second=10.0)
    expected, taken = (float(number) for number in re.findall(r": ([0-9.]+)", line))
    (memory,) = memory_of_stages(tiny_plan(), device="cpu")
    assert expected == pytest.approx(memory.total / 2**20, abs=0.05)
    assert taken > expected


@pytest.mark.parametrize("name", ["lm loss", "Grad Norm", "MFU", "event", "time/mine", "first"])
def test_a_metric_does_not_replace_another_number_of_the_journal(name):
    metrics = PluginMetrics({"one": lambda state: {"first": 1.0}, "two": lambda state: {name: 2.0}})
    with problem(f'--metric two … "{name}" … rename'):
        metrics(TrainState())


def test_a_metric_that_is_no_number_is_refused():
    metrics = PluginMetrics({"one": lambda state: {"first": "text"}})
    with problem('--metric one … str … "first"'):
        metrics(TrainState())


def test_the_numbers_of_all_metrics_are_recorded():
    metrics = PluginMetrics({"one": lambda state: {"first": 1.0}, "two": lambda state: {"b": 2.0}})
    assert [metrics(TrainState()) for _ in range(2)] == [{"first": 1.0, "b": 2.0}] * 2
