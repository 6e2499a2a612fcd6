"""Runs of a hybrid network: equal losses in every layout, resumed, resharded, and generated from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from jobs import journal, losses, start_ranks, tool
from torch.testing import assert_close

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint

RUN = [
    *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--train-iters", "4", "--lr", "1e-2", "--log-interval", "1", "--eval-iters", "0"),
    *("--mock-data", "--reset-attention-mask", "--save-interval", "2", "--device", "cpu"),
]
TOKENS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "60"]
NETWORK = [
    *("--hybrid-layer-pattern", "MG*-"),
    *("--hidden-size", "32", "--num-attention-heads", "4", "--position-embedding-type", "none"),
    *("--mamba-head-dim", "8", "--mamba-num-groups", "2", "--mamba-state-dim", "8"),
    *("--linear-key-head-dim", "8", "--linear-value-head-dim", "8"),
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "4"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", *TOKENS),
]
TENSOR = ["--tensor-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of one rank."""
    save = tmp_path_factory.mktemp("hybrid") / "run"
    start_ranks(1, *NETWORK, *RUN, "--save", str(save)).succeeded()
    return save


@pytest.mark.parametrize(
    "layout",
    [
        [*TENSOR, "--sequence-parallel"],
        [*TENSOR, "--checkpoint-activations"],
        ["--pipeline-model-parallel-size", "2"],
        ["--zero-stage", "2"],
    ],
    ids=["sequence", "tensor", "pipeline", "replicas"],
)
def test_losses_are_those_of_one_rank(trained: Path, tmp_path: Path, layout: list[str]) -> None:
    save = tmp_path / "run"
    start_ranks(2, *NETWORK, *RUN, *layout, "--save", str(save)).succeeded()
    assert losses(save) == pytest.approx(losses(trained), rel=1e-4)


def test_a_run_goes_on_in_another_layout(trained: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    shutil.copytree(trained / "global_step2", save / "global_step2")
    words = ["--use-checkpoint-args", *TOKENS, *RUN, *TENSOR]
    start_ranks(2, *words, "--load", str(save), "--save", str(save)).succeeded()
    assert losses(save) == pytest.approx(losses(trained)[2:], rel=1e-4)
    (start,) = journal(save, "start")
    assert start["flags"]["--network"] == "hybrid"


def test_16_bits_train_too(trained: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    start_ranks(2, *NETWORK, *RUN, *TENSOR, "--bf16", "--save", str(save)).succeeded()
    assert losses(save) == pytest.approx(losses(trained), rel=2e-2)
    found, expected = (weights_of_heads(each / "global_step4") for each in (save, trained))
    assert len(found) == 5
    for name, weight in found.items():
        # Steps of 0.01 add up below the spacing of bf16.
        assert not torch.equal(weight, weight.bfloat16().float())
        assert_close(weight, expected[name], rtol=2**-8, atol=0.01)


def weights_of_heads(folder: Path) -> dict[str, torch.Tensor]:
    """Return A_log, dt_bias and D of a checkpoint, in fp32 as the optimizer has them."""
    parameters = read_checkpoint(folder, read_manifest(folder)).parameters
    kinds = (".A_log", ".dt_bias", ".D")
    states = {name: state.weight for name, state in parameters.items() if name.endswith(kinds)}
    return {name: weight.rows(0, weight.shape[0]) for name, weight in states.items()}


def generated(folder: Path, ranks: int = 1) -> str:
    """Return the tokens with which a checkpoint continues a prompt."""
    file = folder.with_suffix(".jsonl")
    prompts = folder.with_suffix(".txt")
    prompts.write_text("3 14 15 9 2 6\n")
    words = ["--load", str(folder), "--device", "cpu", "--out-seq-length", "8", "--greedy"]
    words += ["--sample-input-file", str(prompts), "--sample-output-file", str(file)]
    words += ["--tensor-model-parallel-size", str(ranks)]
    start_ranks(ranks, *words, script="tools/generate_samples_gpt.py").succeeded()
    text: str = json.loads(file.read_text())["text"]
    return text


def test_it_is_resharded_and_generates(trained: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    words = ["--input_folder", str(trained / "global_step4"), "--output_folder", str(two)]
    tool("tools/convert_checkpoint/deepspeed_to_deepspeed.py", *words, "--target_tp", "2")
    text = generated(trained)
    assert len(text.split()) >= 8
    assert generated(two, ranks=2) == text


def test_networks_that_transformers_lacks_are_not_exported(trained: Path, tmp_path: Path) -> None:
    words = ["--load", str(trained), "--save", str(tmp_path / "out")]
    done = tool("tools/convert_checkpoint/to_hf.py", *words)
    assert done.codes != [0] and "--hybrid-layer-pattern" in done.outputs[0]


def test_megatron_lm_files_are_not_written(trained: Path, tmp_path: Path) -> None:
    words = ["--saver", "megatron", "--load-dir", str(trained), "--save-dir", str(tmp_path / "out")]
    done = tool("tools/checkpoint/util.py", "--model-type", "GPT", *words)
    assert done.codes != [0]
    assert "hybrid is not written in the format of Megatron-LM" in done.outputs[0]
    assert "to_hf.py" in done.outputs[0]
