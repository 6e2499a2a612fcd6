"""Token classification and question answering: data, metrics, score tables and prediction files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replace_text
from megatron.extensions.tasks.data.columns import Layout
from megatron.extensions.tasks.data.metrics import (
    MACRO_AVERAGES,
    Score,
    accuracy,
    class_scores,
    confusion_matrix,
    entity_scores,
    score_table,
)
from megatron.extensions.tasks.data.squad import SquadDataset, WindowSpec, read_squad
from megatron.extensions.tasks.data.squad_answers import (
    AnswerSpec,
    Prediction,
    predict,
    write_predictions,
)
from megatron.extensions.tasks.data.squad_scores import squad_scores
from megatron.extensions.tasks.data.tagging import TaggingDataset, name_of, read_sentences
from megatron.extensions.tasks.data.task import Predicted
from megatron.extensions.tasks.data.text_flags import TextTaskPlan
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True)
class TaggingTask:
    """Token classification: a label for each word, scored by word and by entity."""

    plan: TextTaskPlan
    name: str = "token-classification"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels in the order of their ids."""
        return self.plan.labels

    def data(
        self, paths: Sequence[Path], *, tokenizer: Tokenizer, seq_length: int, trains: bool
    ) -> TaggingDataset:
        """Return the features of sentences; training weighs their labels.

        Raises:
            WrongDataError: a file is missing or malformed, or a label is unknown.
        """
        return TaggingDataset(
            [
                sentence
                for path in paths
                for sentence in read_sentences(path, labelled=trains, layout=Layout.of(self.plan))
            ],
            "+".join(map(name_of, paths)),
            labels=self.plan.labels,
            tokenizer=tokenizer,
            seq_length=seq_length,
            ignore_extra_tokens=self.plan.ignore_extra_tokens,
            ignore_start_end=self.plan.ignore_start_end,
            balances=trains and self.plan.balances_classes,
        )

    def num_samples(self, paths: Sequence[Path], tokenizer: Callable[[], Tokenizer], _: int) -> int:
        """Return how many sentences files have."""
        layout = Layout.of(self.plan)
        return sum(len(read_sentences(path, layout=layout)) for path in paths)

    def metrics(self, predicted: Sequence[Predicted]) -> dict[str, float]:
        """Return the accuracy of words, and precision, recall and F1 of entities."""
        words, labels = self._words(predicted)
        entities = self._entity_scores(predicted)["micro avg"]
        return {
            "accuracy": accuracy(words, labels),
            "entity precision": entities.precision,
            "entity recall": entities.recall,
            "entity f1": entities.f1,
        }

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the F1 of entities."""
        return metrics["entity f1"]

    def correct(self, predicted: Sequence[Predicted]) -> tuple[int, int]:
        """Return how many words have the right label, and of how many."""
        words, labels = self._words(predicted)
        return int((words == labels).sum()), len(labels)

    def table(self, predicted: Sequence[Predicted]) -> str:
        """Return precision, recall and F1 of each label by word, and of each type by entity."""
        matrix, macro = (
            confusion_matrix(*self._words(predicted), len(self.plan.labels)),
            self.plan.macro_average,
        )
        words = score_table(class_scores(matrix, self.plan.labels, macro))
        return (
            f"labels of words (macro avg: {MACRO_AVERAGES[macro]})\n{words}\n"
            f"entities ({self.plan.tag_scheme})\n{score_table(self._entity_scores(predicted))}"
        )

    def write(self, directory: Path, predicted: Sequence[Predicted]) -> list[Path]:
        """Write the predicted labels of each file, a sentence on each line; return the paths."""
        paths = []
        for each in predicted:
            paths.append(directory / f"predictions_{each.data.name}.txt")
            lines = (" ".join(tags) + "\n" for tags in self._predicted_tags(each))
            replace_text(paths[-1], "".join(lines))
        return paths

    def _entity_scores(self, predicted: Sequence[Predicted]) -> dict[str, Score]:
        return entity_scores(
            *self._tags(predicted),
            scheme=self.plan.tag_scheme,
            macro_average=self.plan.macro_average,
        )

    def _words(self, predicted: Sequence[Predicted]) -> tuple[NDArray, NDArray]:
        """Return the predicted and the true label of every word."""
        rows = [row for each in predicted for row in _word_labels(each)]
        labels = [row for each in predicted for row in cast(TaggingDataset, each.data).labels]
        return np.concatenate(rows), np.concatenate(labels)

    def _predicted_tags(self, predicted: Predicted) -> Iterator[list[str]]:
        for row in _word_labels(predicted):
            yield [self.plan.labels[label] for label in row]

    def _tags(self, predicted: Sequence[Predicted]) -> tuple[list[list[str]], list[list[str]]]:
        """Return the predicted and the true labels of each sentence, by name."""
        tags = [row for each in predicted for row in self._predicted_tags(each)]
        sentences = (s for each in predicted for s in cast(TaggingDataset, each.data).sentences)
        return tags, [[*sentence.labels] for sentence in sentences]


def _word_labels(predicted: Predicted) -> Iterator[NDArray]:
    data = cast(TaggingDataset, predicted.data)
    for i in range(len(data)):
        yield data.word_labels(i, predicted.outputs[i])


class AnswerDataset(SquadDataset):
    """Windows of the questions of files of SQuAD's form, with their names."""

    name: str
    token_texts: Sequence[str]
    lower_case: bool

    @property
    def has_labels(self) -> bool:
        """Whether there are answers to compare with."""
        return any(question.answers for question in self.questions)


@dataclass(frozen=True)
class AnswerTask:
    """Extractive question answering (SQuAD 1.1 and 2.0): exact match and F1 of the official rules."""

    plan: TextTaskPlan
    name: str = "question-answering"
    labels: tuple[str, ...] = ()

    def data(
        self, paths: Sequence[Path], *, tokenizer: Tokenizer, seq_length: int, trains: bool
    ) -> AnswerDataset:
        """Return the windows of questions and contexts.

        Raises:
            WrongDataError: a file is missing or malformed.
            ConfigError: there is no room for a context.
        """
        version_2 = self.plan.has_unanswerable
        data = AnswerDataset(
            [
                question
                for path in paths
                for question in read_squad(path, is_training=trains, version_2=version_2)
            ],
            tokenizer=tokenizer,
            spec=WindowSpec(seq_length, self.plan.doc_stride, self.plan.max_query_length),
        )
        data.name = "+".join(path.name.removesuffix(".json") for path in paths)
        data.token_texts = tokenizer.vocabulary().tokens
        data.lower_case = tokenizer.encode("A") == tokenizer.encode("a")
        return data

    def num_samples(
        self, paths: Sequence[Path], tokenizer: Callable[[], Tokenizer], seq_length: int
    ) -> int:
        """Return how many windows the contexts of files make."""
        return len(self.data(paths, tokenizer=tokenizer(), seq_length=seq_length, trains=True))

    def metrics(self, predicted: Sequence[Predicted]) -> dict[str, float]:
        """Return exact match and F1 in percent.

        Of SQuAD 2.0 also of questions with an answer and without, and the best scores with a
        threshold on the score of no answer.
        """
        # Files may have questions with the same id.
        found = [
            replace(p, question=replace(p.question, uid=f"{number} {p.question.uid}"))
            for number, each in enumerate(predicted)
            for p in self._answers(each)
        ]
        scores = squad_scores(
            {p.question.uid: p.answer for p in found},
            [p.question for p in found],
            null_odds={p.question.uid: p.null_score_diff for p in found}
            if self.plan.has_unanswerable
            else None,
            rules=self.plan.squad_rules,
        )
        return {name: value for name, value in scores.items() if not name.endswith("total")}

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the F1."""
        return metrics["f1"]

    def correct(self, predicted: Sequence[Predicted]) -> None:
        """Return None: answers may be partly right."""

    def table(self, predicted: Sequence[Predicted]) -> str:
        """Return the official scores, one on each line."""
        metrics = self.metrics(predicted)
        width = max(map(len, metrics))
        lines = (f"{name:<{width}}  {value:.2f}" for name, value in metrics.items())
        return "\n".join([f"answers (rules of SQuAD {self.plan.squad_rules})", *lines])

    def write(self, directory: Path, predicted: Sequence[Predicted]) -> list[Path]:
        """Write answers and candidates of each file to a folder of its name; return the folders."""
        folders = []
        for each in predicted:
            folders.append(directory / f"predictions_{each.data.name}")
            folders[-1].mkdir(parents=True, exist_ok=True)
            write_predictions(folders[-1], self._answers(each))
            for file, written in (
                (self.plan.prediction_file, "test_prediction.json"),
                (self.plan.nbest_file, "test_nbest.json"),
            ):
                if file:
                    text = (folders[-1] / written).read_text(encoding="utf-8")
                    replace_text(Path(file), text)
        return folders

    def _answers(self, predicted: Predicted) -> list[Prediction]:
        data, logits = cast(AnswerDataset, predicted.data), np.asarray(predicted.outputs)
        spec = AnswerSpec(
            n_best_size=self.plan.n_best,
            max_answer_length=self.plan.max_answer_length,
            version_2=self.plan.has_unanswerable,
            null_score_diff_threshold=self.plan.null_threshold,
            lower_case=data.lower_case,
        )
        return predict(
            data, logits[..., 0], logits[..., 1], spec=spec, token_texts=data.token_texts
        )
