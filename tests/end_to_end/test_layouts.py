"""The same seed trains the same model, whatever the layout."""

from pathlib import Path

import pytest
import torch
from checkpoints import whole_weights
from jobs import Corpus, journal, launched, losses, start_ranks

from megatron.checkpointing.manifest import read_manifest

RUN = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "48"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "12"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--weight-decay", "0.1"),
    # Clipping is on in every step: a norm that one layout counts otherwise shows in the losses.
    *("--clip-grad", "0.2", "--lr", "3e-3", "--lr-decay-style", "constant"),
    *("--log-interval", "1", "--eval-iters", "0", "--save-interval", "100"),
    # The padding of the vocabulary depends on the tensor-parallel size unless it is set.
    *("--pad-vocab-size-to", "512"),
]


@pytest.fixture(scope="module")
def alone(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the --save directory of the run of one process, without a launcher."""
    save = tmp_path_factory.mktemp("alone")
    start_ranks(1, *RUN, *corpus.flags, "--save", str(save)).succeeded()
    assert losses(save)[-1] < losses(save)[0] - 0.5, "the reference does not learn"
    return save


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ""), (2, "--pipeline-model-parallel-size 2 --checkpoint-activations")]
)
def test_evaluation_in_other_batches_reads_the_same_samples(
    ranks: int, layout: str, corpus: Corpus, tmp_path: Path
) -> None:
    flags = [*RUN, *corpus.flags, *layout.split(), "--split", "80,20", "--train-iters", "4"]
    flags += ["--eval-interval", "2"]
    halves = ["--eval-iters", "4", "--eval-global-batch-size", "4", "--eval-micro-batch-size", "1"]
    for name, sizes in (("same", ["--eval-iters", "2"]), ("other", halves)):
        start_ranks(ranks, *flags, *sizes, "--save", str(tmp_path / name)).succeeded()
    same, other = (
        [record["lm_loss"] for record in journal(tmp_path / name, "evaluation")]
        for name in ("same", "other")
    )
    assert len(set(same)) >= 2
    assert other == pytest.approx(same, rel=1e-6)
    assert losses(tmp_path / "other") == losses(tmp_path / "same")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ""),
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-activations"),
        (2, "--ds-sequence-parallel-size 2"),
        (2, "--zero-stage 2"),
        (2, "--zero-stage 3"),
        (2, "--zero-stage 1 --pipeline-model-parallel-size 2 --checkpoint-activations"),
        (2, "--zero-stage 3 --tensor-model-parallel-size 2 --checkpoint-activations"),
    ],
)
def test_losses_and_weights_are_those_of_one_process(
    ranks: int, layout: str, alone: Path, corpus: Corpus, tmp_path: Path
) -> None:
    flags = [*RUN, *corpus.flags, "--save", str(tmp_path), *layout.split()]
    start = launched if layout == "" else start_ranks
    start(ranks, *flags).succeeded()

    assert len(losses(tmp_path)) == 12
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-4)
    expected, found = saved_weights(alone), saved_weights(tmp_path)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=2e-4, msg=name)


def saved_weights(save: Path) -> dict[str, torch.Tensor]:
    folder = save / "global_step12"
    return whole_weights(folder, read_manifest(folder))
