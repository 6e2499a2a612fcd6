"""A run of 2N steps is N steps, a resume, and N steps: bit for bit."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Corpus, journal, launched, start_ranks

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "1", "--lr", "3e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
    *("--log-interval", "1", "--eval-interval", "3", "--eval-iters", "2", "--split", "80,20"),
    *("--save-interval", "4", "--pad-vocab-size-to", "512"),
]
BATCH = ["--global-batch-size", "8"]
ITERATIONS = [*BATCH, "--train-iters", "8", "--lr-warmup-iters", "3"]
SAMPLES = ["--train-samples", "48", "--lr-warmup-samples", "10"]
RAMP = [*BATCH, *SAMPLES, "--rampup-batch-size", "4", "2", "20"]
STEPS = [*SAMPLES, "--step-batch-size-schedule", "0:4", "384:6", "640:8"]


@pytest.mark.parametrize(
    ("start", "ranks", "extra"),
    [
        (start_ranks, 1, ITERATIONS),
        (start_ranks, 1, STEPS),
        (start_ranks, 1, [*RAMP, "--bf16", "--checkpoint-activations"]),
        (start_ranks, 2, [*ITERATIONS, "--bf16", "--pipeline-model-parallel-size", "2"]),
        (start_ranks, 2, [*RAMP, "--bf16", "--zero-reduce-bucket-size", "5000"]),
        (launched, 2, [*RAMP, "--zero-stage", "1"]),
        (start_ranks, 2, [*ITERATIONS, "--bf16", "--zero-stage", "3"]),
        (start_ranks, 2, [*RAMP, "--tensor-model-parallel-size", "2", "--zero-stage", "2"]),
        (start_ranks, 2, [*RAMP, "--pipeline-model-parallel-size", "2", "--enable-zbh1-pipeline"]),
    ],
    ids=[
        "fp32",
        "fp32-step-schedule",
        "bf16-ramp",
        "bf16-pp2",
        "bf16-dp2-buckets",
        "zero1-dp2",
        "bf16-zero3",
        "tp2-zero2",
        "fp32-zero-bubble-ramp",
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    start: Any, ranks: int, extra: list[str], corpus: Corpus, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = [*RUN, *extra, *corpus.flags]
    start(ranks, *flags, "--save", str(whole)).succeeded()
    shutil.copytree(whole / "global_step4", resumed / "global_step4")
    again = start(ranks, *flags, "--save", str(resumed), "--load", str(resumed)).succeeded()

    assert "successfully loaded checkpoint" in again.outputs[0]
    last = len(journal(whole, "train"))
    assert last > 4
    assert journal_values(resumed, "train") == journal_values(whole, "train")[4:]
    assert journal_values(resumed, "evaluation") == journal_values(whole, "evaluation")[1:]
    assert_same_files(whole / f"global_step{last}", resumed / f"global_step{last}")


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_a_resumed_run_takes_the_optimizers_constants_of_its_own_flags(
    precision: list[str], corpus: Corpus, tmp_path: Path
) -> None:
    flags = [*RUN, *ITERATIONS, *precision, *corpus.flags, "--save", str(tmp_path)]
    start_ranks(1, *flags, "--exit-interval", "4").succeeded()
    changed = ["--weight-decay", "0.7", "--adam-beta2", "0.5", "--clip-grad", "0.001"]
    again = start_ranks(1, *flags, *changed, "--load", str(tmp_path)).succeeded()

    assert re.search(r"--weight-decay +0\.01 +0\.7\n", again.outputs[0])
    used = optimizer_groups(tmp_path / "global_step8")
    assert [group["weight_decay"] for group in used] == [0.7, 0.0]
    assert {group["betas"] for group in used} == {(0.9, 0.5)}

    # Done: once more changes nothing and evaluates nothing.
    before = sorted(journal(tmp_path, "evaluation"), key=str)
    start_ranks(1, *flags, *changed, "--load", str(tmp_path)).succeeded()
    assert sorted(journal(tmp_path, "evaluation"), key=str) == before


WSD = [
    *("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "4", "--lr-decay-tokens", "2000"),
    *("--lr-wsd-decay-style", "linear"),
    *("--optimizer", "muon", "--muon-extra-scale-factor", "0.2", "--bf16"),
    *("--start-weight-decay", "0.01", "--end-weight-decay", "0.2"),
    *("--weight-decay-incr-style", "cosine"),
]
INVERSE_ROOT = ["--lr-decay-style", "inverse-square-root", "--optimizer", "lion"]


@pytest.mark.parametrize("schedule", [INVERSE_ROOT, WSD], ids=["inverse-square-root", "wsd"])
def test_schedules_go_on_where_they_were_or_as_the_flags_say(
    schedule: list[str], corpus: Corpus, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = [*RUN, *ITERATIONS, *schedule, "--lr-warmup-init", "1e-4", *corpus.flags]
    start_ranks(1, *flags, "--save", str(whole)).succeeded()
    shutil.copytree(whole / "global_step4", resumed / "global_step4")
    start_ranks(1, *flags, "--save", str(resumed), "--load", str(resumed)).succeeded()
    assert len({record["learning_rate"] for record in journal(whole, "train")}) >= 6
    assert journal_values(resumed, "train") == journal_values(whole, "train")[4:]
    assert_same_files(whole / "global_step8", resumed / "global_step8")
    if schedule is INVERSE_ROOT:
        return

    other = ["--lr", "5e-3", "--train-iters", "9", "--use-checkpoint-lr-scheduler"]
    start_ranks(1, *flags, *other, "--save", str(resumed), "--load", str(resumed)).succeeded()
    # 2048 tokens are consumed, which is past the span of 2000.
    assert journal(resumed, "train")[-1]["learning_rate"] == pytest.approx(1e-4)


def optimizer_groups(folder: Path) -> list[dict[str, Any]]:
    for file in (*folder.glob("*optim_states.pt"), *folder.glob("mp_rank_*")):
        state = torch.load(file, weights_only=False)
        if "optimizer_state_dict" in state:
            return state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        if state.get("optimizer"):
            return state["optimizer"]["param_groups"]
    raise AssertionError(f"{folder} holds no optimizer")


def journal_values(save: Path, event: str) -> list[dict[str, Any]]:
    """Return the journal's records without what depends on the clock."""
    clock = ("iteration_ms", "samples_per_second", "tflops", "eta_s")
    clock += ("resident_gib", "host_available_gib")
    return [{k: v for k, v in r.items() if k not in clock} for r in journal(save, event)]


def assert_same_files(expected: Path, found: Path) -> None:
    names = sorted(file.name for file in expected.glob("*.pt"))
    assert names == sorted(file.name for file in found.glob("*.pt"))
    for name in names:
        pair = (torch.load(folder / name, weights_only=False) for folder in (expected, found))
        assert_same(*pair, name)


def assert_same(expected: Any, found: Any, where: str) -> None:
    assert type(expected) is type(found), where
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found), where
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            assert_same(value, found[key], f"{where}: {key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(found), where
        for i, pair in enumerate(zip(expected, found, strict=True)):
            assert_same(*pair, f"{where}: {i}")
    elif isinstance(expected, int | float | str | bytes | torch.dtype | None):
        assert expected == found, where
    else:
        assert_same(vars(expected), vars(found), where)
