"""Predictions of several models are combined: by the mean, by majority, with thresholds."""

import importlib.util
from pathlib import Path

import pytest
import torch
from problems import problem

from megatron.common.errors import WrongDataError

SCRIPT = Path(__file__).resolve().parents[3] / "tasks" / "ensemble_classifier.py"
THREE = [
    [[0.6, 0.4, 0.0], [0.1, 0.5, 0.4], [0.3, 0.3, 0.4]],
    [[0.6, 0.4, 0.0], [0.1, 0.5, 0.4], [0.3, 0.4, 0.3]],
    [[0.0, 0.9, 0.1], [0.1, 0.1, 0.8], [0.5, 0.2, 0.3]],
]
"""Probabilities of three classes for three samples, by model."""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("ensemble_classifier", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def combine(tool, tmp_path, capsys):
    """Return a function from predictions of models and flags to the rows written, and the output."""

    def write(number, sets, name="test_predictions.pt"):
        folder = tmp_path / f"model{number}"
        folder.mkdir(exist_ok=True)
        rows = [(key, (votes, [0, 1, 1], [*range(3)])) for key, votes in sets.items()]
        torch.save(rows, folder / name)
        return str(folder)

    def run(models, *flags, name="test_predictions.pt"):
        paths = [write(number, sets, name) for number, sets in enumerate(models)]
        tool.main(["--paths", *paths, "--outdir", str(tmp_path / "out"), *flags])
        found = {
            file.parent.name: [line.split("\t") for line in file.read_text().splitlines()]
            for file in (tmp_path / "out").glob("*/test_predictions.tsv")
        }
        assert all(rows.pop(0) == ["id", "label"] for rows in found.values())
        assert all([row[0] for row in rows] == ["0", "1", "2"] for rows in found.values())
        return {key: [row[1] for row in rows] for key, rows in found.items()}, capsys.readouterr()

    return run


def test_the_mean_or_the_majority_decides(combine):
    models = [{"dev": votes} for votes in THREE]
    assert combine(models)[0] == {"dev": ["1", "2", "0"]}
    labels = ("--labels", "no", "yes", "maybe")
    # The last sample has a vote for each class, and the first of them is the likeliest.
    found, output = combine(models, "--majority", "--eval", *labels)
    assert found == {"dev": ["no", "yes", "no"]}
    assert "dev: correct / total = 2 / 3 = 66.6667 %" in output.out
    assert "overall: correct / total = 2 / 3 = 66.6667 %" in output.out


def test_the_only_file_of_predictions_is_found(combine):
    models = [{"dev": votes} for votes in THREE]
    assert combine(models, name="predictions_dev.pt")[0] == {"dev": ["1", "2", "0"]}
    with problem("predictions_dev.pt … --prediction-name", WrongDataError):
        combine(models, "--prediction-name", "none.pt", name="predictions_dev.pt")


def test_thresholds_of_two_classes(combine):
    sets = {"a": [[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]], "b": [[0.4, 0.6], [0.3, 0.7], [0.8, 0.2]]}
    both = [sets, sets]
    assert combine(both, "--threshold", "0.35")[0] == {"a": ["0", "0", "1"], "b": ["1", "1", "0"]}
    found, _ = combine(both, "--threshold", "0.35", "0.65")
    assert found == {"a": ["0", "0", "1"], "b": ["0", "1", "0"]}
    found, output = combine(both, "--calc-threshold")
    assert found == {"a": ["0", "1", "1"], "b": ["1", "1", "1"]}
    assert "threshold [0.11, 0.0]" in output.out
    found, output = combine(both, "--calc-threshold", "--one-threshold")
    assert "threshold [0.11, 0.11]" in output.out
    assert found == {"a": ["0", "1", "1"], "b": ["1", "1", "1"]}
    for flags, message in (
        (("--threshold", "0.1", "0.2", "0.3"), "--threshold … 3"),
        (("--threshold", "0.1", "--calc-threshold"), "--threshold … --calc-threshold … contradict"),
        (("--one-threshold",), "--one-threshold … --calc-threshold"),
        (("--majority", "--threshold", "0.1"), "--majority … threshold"),
        (("--labels", "a", "b", "c"), "--labels … 2 classes"),
    ):
        with problem(message):
            combine(both, *flags)
    with problem("--threshold … two classes"):
        combine([{"dev": THREE[0]}], "--threshold", "0.1")


def test_scores_of_a_regression_are_averaged(combine):
    models = [{"dev": [[1.0], [2.0], [3.5]]}, {"dev": [[2.0], [4.0], [3.5]]}]
    found, output = combine(models, "--eval")
    assert found == {"dev": ["1.5", "3", "3.5"]}
    assert "dev: pearson = 0.97" in output.out


def test_predictions_that_do_not_belong_together_are_refused(combine, tool, tmp_path):
    with problem("model1 … test … dev", WrongDataError):
        combine([{"dev": THREE[0]}, {"test": THREE[0]}])
    with problem("model1 … classes … dev", WrongDataError):
        combine([{"dev": THREE[0]}, {"dev": [row[:2] for row in THREE[0]]}])
    (tmp_path / "damaged.pt").write_bytes(b"damaged")
    with problem("damaged.pt … no predictions", WrongDataError):
        tool.main(["--paths", str(tmp_path / "damaged.pt"), "--outdir", str(tmp_path)])
    with problem("--paths … no … /missing", WrongDataError):
        tool.main(["--paths", str(tmp_path / "missing"), "--outdir", str(tmp_path)])
