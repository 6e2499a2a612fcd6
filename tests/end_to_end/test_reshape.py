"""A run that goes on in another layout, with nothing in between."""

import re
import shutil
from pathlib import Path

import pytest
from jobs import Corpus, journal, losses, start_ranks, tool

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--attention-dropout", "0"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "3e-3", "--train-iters", "7"),
    *("--log-interval", "1", "--eval-iters", "0", "--save-interval", "3"),
    *("--pad-vocab-size-to", "512"),
]


def test_a_run_goes_on_in_another_layout(corpus: Corpus, tmp_path: Path) -> None:
    whole, moved, alone = tmp_path / "whole", tmp_path / "moved", tmp_path / "alone"
    flags = [*RUN, "--hidden-dropout", "0", *corpus.flags]
    start_ranks(2, *flags, "--save", str(whole)).succeeded()
    expected = losses(whole)
    assert len(expected) == 7

    shutil.copytree(whole / "global_step3", moved / "global_step3")
    pipeline = ["--pipeline-model-parallel-size", "2", "--zero-stage", "1", "--exit-interval", "6"]
    (output, _) = start_ranks(2, *flags, *pipeline, *both(moved)).succeeded().outputs
    assert re.search(r"--pipeline-model-parallel-size +1 +2\n", output)
    assert "RNG states belong to ranks, and the ranks differ" in output
    assert losses(moved) == pytest.approx(expected[3:6], rel=1e-5)

    # What a reshaped run saves is a checkpoint like any other.
    shutil.copytree(moved / "global_step6", alone / "global_step6")
    start_ranks(1, *flags, *both(alone)).succeeded()
    assert losses(alone) == pytest.approx(expected[6:], rel=1e-5)
    assert journal(alone, "train")[-1]["consumed_samples"] == 28

    # Without a layout it is the same state, and may be newer than others beside it.
    plain = tmp_path / "plain"
    convert = ["--input_folder", str(moved / "global_step6"), "--output_folder", str(plain / "six")]
    for _ in range(2):
        tool("tools/convert_checkpoint/ds_to_universal.py", *convert).succeeded()
    files = sorted(file.name for file in (plain / "six" / "zero" / "6.bias").iterdir())
    assert files == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
    shutil.copytree(whole / "global_step3", plain / "global_step3")
    digests = [digest(folder) for folder in (plain / "six", moved, plain / "global_step3")]
    assert digests[0] == digests[1] != digests[2]
    # Three replicas do not divide a batch of 4: the third process waits.
    elastic = ["--zero-stage", "3", "--universal-checkpoint", "--elastic"]
    (output, _, spare) = start_ranks(3, *flags, *elastic, *both(plain)).succeeded().outputs
    assert f"reshaping {plain / 'six'} to this layout" in output
    assert "the last 1 of 3 processes (from rank 2 on) wait for the end of the run" in output
    assert re.fullmatch(r"\[rank 2\] a spare: waits on .* for the end of the run\n", spare)
    assert losses(plain) == pytest.approx(expected[6:], rel=1e-5)
    (shown,) = tool("tools/checkpoint/inspect.py", str(plain), "--parameters").succeeded().outputs
    assert "parameters: 28 | elements: 42880" in shown
    assert "6.bias [32] | fp32, exp_avg, exp_avg_sq | steps: 7" in shown

    words = ["--input_folder", str(moved / "global_step6"), "--output_folder", str(tmp_path / "tp")]
    tool(
        "tools/convert_checkpoint/deepspeed_to_deepspeed.py",
        *words,
        "--target_tp=2",
        "--target_pp=1",
    ).succeeded()
    assert digest(tmp_path / "tp") == digests[1]
    names = {file.name for file in (tmp_path / "tp" / "global_step6").glob("mp_rank_*")}
    assert names == {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"}

    convert[1] = str(whole / "global_step3")
    refused = tool("tools/convert_checkpoint/ds_to_universal.py", *convert)
    assert refused.codes == [2]
    (other,) = refused.outputs
    assert "exists and is another checkpoint: move it away" in other


def test_streams_begin_anew_but_the_same_each_time(corpus: Corpus, tmp_path: Path) -> None:
    flags = [*RUN, "--hidden-dropout", "0.3", *corpus.flags]
    start_ranks(1, *flags, "--save", str(tmp_path / "first")).succeeded()
    for name in ("one", "two", "stage"):
        shutil.copytree(tmp_path / "first" / "global_step3", tmp_path / name / "global_step3")
    start_ranks(2, *flags, *both(tmp_path / "one")).succeeded()
    start_ranks(2, *flags, *both(tmp_path / "two")).succeeded()
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    # The same ranks keep their streams, whatever ZeRO divides.
    resumed = start_ranks(1, *flags, "--zero-stage", "2", *both(tmp_path / "stage")).succeeded()
    (output,) = resumed.outputs
    assert re.search(r"--zero-stage +0 +2\n", output)
    assert "random streams" not in output
    assert losses(tmp_path / "stage") == pytest.approx(losses(tmp_path / "first")[3:], rel=1e-6)


def test_multi_token_prediction_goes_on_in_another_layout_and_generates(
    corpus: Corpus, tmp_path: Path
) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    flags = [
        *(*RUN, "--hidden-dropout", "0", "--position-embedding-type", "rope", *corpus.flags),
        *("--mtp-num-layers", "2", "--untie-embeddings-and-output-weights"),
    ]
    pipeline = ["--pipeline-model-parallel-size", "2", "--zero-stage", "1"]
    outputs = start_ranks(2, *flags, *pipeline, "--save", str(whole)).succeeded().outputs
    assert "| mtp loss: " in "".join(outputs)
    expected = losses(whole)
    shutil.copytree(whole / "global_step3", moved / "global_step3")
    tensor = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    start_ranks(2, *flags, *tensor, *both(moved)).succeeded()
    assert losses(moved) == pytest.approx(expected[3:], rel=1e-5)
    terms = [[step["mtp_loss"] for step in journal(run, "train")] for run in (whole, moved)]
    assert terms[1] == pytest.approx(terms[0][3:], rel=1e-5)

    words = ["--prompt", "a", "--out-seq-length", "6", "--greedy"]
    texts = [
        tool("tools/generate_samples_gpt.py", "--load", str(run), *words).succeeded().outputs
        for run in (whole, moved)
    ]
    (first,), (second,) = texts
    assert first.partition("Context:")[2] == second.partition("Context:")[2] != ""


def digest(folder: Path) -> str:
    (output,) = tool("tools/checkpoint/digest.py", str(folder)).succeeded().outputs
    return output.split()[0]


def both(directory: Path) -> list[str]:
    return ["--save", str(directory), "--load", str(directory)]
