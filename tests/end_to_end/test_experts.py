"""A network with experts, trained, evaluated, saved and resumed as a user would."""

import shutil
from pathlib import Path

import pytest
from jobs import Corpus, journal, start_ranks, tool
from test_resume import ITERATIONS, RUN, assert_same_files, journal_values

EXPERTS = [
    *("--num-experts", "4", "--expert-interval", "1", "--topk", "2", "--mlp-type", "residual"),
    *(
        "--disable-moe-top2-2nd-expert-sampling",
        "--attention-dropout",
        "0",
        "--hidden-dropout",
        "0",
    ),
]
SHARED = ["--moe-expert-parallel-size", "2"]


def test_a_resumed_run_with_experts_equals_the_uninterrupted_one(
    corpus: Corpus, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = [*RUN, *ITERATIONS, *EXPERTS, *corpus.flags]
    output = start_ranks(2, *flags, *SHARED, "--save", str(whole)).succeeded().outputs[0]
    shutil.copytree(whole / "global_step4", resumed / "global_step4")
    paths = ["--save", str(resumed), "--load", str(resumed)]
    start_ranks(2, *flags, *SHARED, *paths).succeeded()

    assert journal_values(resumed, "train") == journal_values(whole, "train")[4:]
    assert journal_values(resumed, "evaluation") == journal_values(whole, "evaluation")[1:]
    assert_same_files(whole / "global_step8", resumed / "global_step8")
    assert len([*(whole / "global_step8").glob("experts_01_*")]) == 1
    assert all(0 <= record["moe_dropped"] < 1 for record in journal(whole, "train"))
    # Two layers, each at least 0.1 * 1 when all experts are equally busy.
    assert all(0.19 < record["moe_loss"] < 0.4 for record in journal(whole, "train"))
    assert " | lm loss: " in output and " | moe loss: 2." in output
    assert "that a token passes through: 0.000" in output

    # The same checkpoint with all experts on fewer replicas, and in text generation.
    other = tmp_path / "other"
    shutil.copytree(whole / "global_step4", other / "global_step4")
    paths = ["--save", str(other), "--load", str(other)]
    start_ranks(1, *flags, *paths, "--elastic").succeeded()
    losses = [[each["lm_loss"] for each in journal(d, "train")] for d in (other, whole)]
    assert losses[0] == pytest.approx(losses[1][4:], rel=1e-5)
    words = ["--load", str(whole), "--prompt", "import"]
    generated = tool("tools/generate_samples_gpt.py", *words)
    assert generated.codes == [0], generated.outputs
