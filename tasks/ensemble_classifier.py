#!/usr/bin/env python
"""Combine the predictions of several finetuned models: mean of their probabilities, or majority vote."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replace_text
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError, WrongDataError, near, raise_if_any, reason
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.tasks.data.metrics import accuracy, pearson
from megatron.extensions.tasks.inference_flags import EnsembleConfig, ensemble_problems

_THRESHOLDS = np.arange(100) / 100


@dataclass(frozen=True)
class PredictedSet:
    """Predictions of several models for the samples of one file.

    Args:
        votes: probabilities of the classes, or a score, [models, samples, classes].
    """

    votes: NDArray[np.float64]
    labels: NDArray[np.float64]
    ids: Sequence[int | str]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean over the models, [samples, classes]."""
        return self.votes.mean(0)

    def by_majority(self) -> NDArray[np.int64]:
        """Return the class that most models predict; of equally many, the likelier one."""
        counts = (self.votes.argmax(-1)[..., None] == np.arange(self.votes.shape[-1])).sum(0)
        return (counts + self.mean / 2).argmax(-1)


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    parsed = parse_sections(argv, {"ensemble": EnsembleConfig}, description=__doc__ or "").sections
    config: EnsembleConfig = parsed["ensemble"]
    raise_if_any(ensemble_problems(config))
    sets = read_sets([prediction_file(Path(path), config.prediction_name) for path in config.paths])
    found = predictions_of(sets, config)
    for name, predicted in found.items():
        folder = Path(config.outdir) / name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{Path(config.prediction_name).stem}.tsv"
        texts = texts_of(predicted, sets[name], config)
        lines = (f"{i}\t{text}\n" for i, text in zip(sets[name].ids, texts, strict=True))
        replace_text(file, f"id\tlabel\n{''.join(lines)}")
        print(f"{file} has the predictions of {len(config.paths)} models")
    if config.eval:
        labels = {name: each.labels for name, each in sets.items()}
        for name in sets:
            print(f"{name}: {_score(found[name], labels[name], sets[name])}")
        everything = (np.concatenate([*each.values()]) for each in (found, labels))
        print(f"overall: {_score(*everything, next(iter(sets.values())))}")


def prediction_file(folder: Path, name: str) -> Path:
    """Return the file of predictions in a folder of --paths, or the path itself if it is a file.

    Raises:
        WrongDataError: there is none of this name.
    """
    if folder.is_file():
        return folder
    file = folder / name
    if file.is_file():
        return file
    others = sorted(each.name for each in folder.glob("*predictions_*.pt"))
    if name == EnsembleConfig.prediction_name and len(others) == 1:
        return folder / others[0]
    hint = f"; it has {', '.join(others)}: give one as --prediction-name" if others else ""
    raise WrongDataError(f"--paths: there is no {file}{hint or near(file)}")


def read_sets(files: Sequence[Path]) -> dict[str, PredictedSet]:
    """Read the predictions of each model for the same samples.

    Raises:
        WrongDataError: a file is damaged, or has other samples or classes than the first.
    """
    read = [_read(file) for file in files]
    sets = {}
    for name, (votes, labels, ids) in read[0].items():
        for file, each in zip(files, read, strict=True):
            if each.keys() != read[0].keys():
                raise WrongDataError(
                    f"{file} has predictions of {', '.join(each)}, and {files[0]} those of "
                    f"{', '.join(read[0])}"
                )
            if each[name][2] != ids or each[name][0].shape != votes.shape:
                raise WrongDataError(
                    f"{file}: the samples or classes of {name} are others than in {files[0]}"
                )
        sets[name] = PredictedSet(np.stack([each[name][0] for each in read]), labels, ids)
    return sets


def _read(file: Path) -> Mapping[str, tuple[NDArray, NDArray, list[int | str]]]:
    """Return probabilities, labels and ids of each set in a file, which can run no code."""
    import torch

    try:
        rows = torch.load(file, weights_only=True)
        return {
            str(name): (np.asarray(votes, np.float64), np.asarray(labels, np.float64), [*ids])
            for name, (votes, labels, ids) in rows
        }
    except OSError as error:
        raise WrongDataError(f"cannot read {file}: {reason(error, file)}") from error
    except (UnpicklingError, RuntimeError, EOFError, TypeError, ValueError) as error:
        raise WrongDataError(f"{file} holds no predictions of tasks/main.py ({error})") from error


def predictions_of(
    sets: Mapping[str, PredictedSet], config: EnsembleConfig
) -> dict[str, NDArray[np.float64]]:
    """Return the class of each sample, or its score.

    Raises:
        ConfigError: the thresholds or labels do not fit the classes.
    """
    num_classes = {each.votes.shape[-1] for each in sets.values()}
    needs_two = config.threshold or config.calc_threshold
    if needs_two and num_classes != {2}:
        raise ConfigError(
            f"--{'threshold' if config.threshold else 'calc-threshold'} is for two classes; the "
            f"predictions have {max(num_classes)}"
        )
    if config.labels and {len(config.labels)} != num_classes - {1}:
        raise ConfigError(
            f"--labels {' '.join(config.labels)}: the predictions have {max(num_classes)} classes"
        )
    if config.majority:
        return {name: each.by_majority() for name, each in sets.items()}
    if not needs_two:
        return {
            name: each.mean[:, 0] if each.votes.shape[-1] == 1 else each.mean.argmax(-1)
            for name, each in sets.items()
        }
    thresholds = config.threshold or best_thresholds(sets, shares=config.one_threshold)
    if len(thresholds) not in (1, len(sets)):
        raise ConfigError(
            f"--threshold takes 1 number, or one for each of {', '.join(sets)}; found "
            f"{len(thresholds)}"
        )
    thresholds = [*thresholds] * (len(sets) // len(thresholds))
    if config.calc_threshold:
        print(f"threshold {thresholds}")
    return {
        name: (each.mean[:, 1] >= threshold).astype(np.int64)
        for (name, each), threshold in zip(sets.items(), thresholds, strict=True)
    }


def best_thresholds(sets: Mapping[str, PredictedSet], *, shares: bool) -> list[float]:
    """Return the probability of class 1 from which on it is predicted, for the highest accuracy.

    Args:
        shares: whether all sets have the same.
    """
    pairs = [(each.mean[:, 1], each.labels) for each in sets.values()]
    if shares:
        pairs = [tuple(np.concatenate(column) for column in zip(*pairs, strict=True))]  # type: ignore[misc]
    return [
        float(max(_THRESHOLDS, key=lambda t: accuracy(chances >= t, labels)))
        for chances, labels in pairs
    ]


def texts_of(predicted: NDArray, each: PredictedSet, config: EnsembleConfig) -> Sequence[int | str]:
    """Return predictions as they are written: names of --labels, numbers of classes, or scores."""
    if each.votes.shape[-1] == 1:
        return [f"{value:.9g}" for value in predicted]
    return [config.labels[i] if config.labels else int(i) for i in predicted]


def _score(predicted: NDArray, labels: NDArray, each: PredictedSet) -> str:
    if each.votes.shape[-1] == 1:
        return f"pearson = {pearson(predicted, labels):.6f}"
    correct = int((predicted == labels).sum())
    return f"correct / total = {correct} / {len(labels)} = {100 * correct / len(labels):.4f} %"


if __name__ == "__main__":
    run_tool(main)
