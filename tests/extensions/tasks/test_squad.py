"""SQuAD: windows and answers follow BERT's code."""

import json

import numpy as np
import pytest
from problems import problem
from squad_files import asked, entry, squad_file
from tiny import tiny_config

from megatron.common.errors import WrongDataError
from megatron.config.plan.validation import validate
from megatron.extensions.tasks.data.squad import SquadDataset, WindowSpec
from megatron.extensions.tasks.data.squad_answers import (
    AnswerSpec,
    original_text,
    predict,
    write_predictions,
)
from megatron.extensions.tasks.data.squad_scores import answer_f1, exact_match
from megatron.extensions.tasks.data.task import Predicted
from megatron.extensions.tasks.data.text_flags import TextTaskPlan
from megatron.extensions.tasks.data.text_tasks import AnswerTask
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "(", ")", "-", "18", "##95", "19", "##43"]
ID = {word: i for i, word in enumerate(WORDS)}


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocabulary").write_text("\n".join(WORDS))
    return WordPieceTokenizer(tmp_path / "vocabulary", lower_case=True)


def dataset_of(questions, tokenizer, *, seq_length=12, doc_stride=3, max_query_length=2):
    spec = WindowSpec(seq_length, doc_stride, max_query_length)
    return SquadDataset(questions, tokenizer=tokenizer, spec=spec)


def test_a_row_holds_question_and_window(tokenizer):
    dataset = dataset_of([asked("A  b\u202fc d", "b\u202fc", text="g h f")], tokenizer)
    (item,) = (dataset[i] for i in range(len(dataset)))
    tokens = [WORDS[i] for i in item["text"]]
    assert tokens == [
        "[CLS]",
        "g",
        "h",
        "[SEP]",
        "a",
        "b",
        "c",
        "d",
        "[SEP]",
        "[PAD]",
        "[PAD]",
        "[PAD]",
    ]
    assert item["types"].tolist() == [0] * 4 + [1] * 5 + [0] * 3
    assert item["padding_mask"].tolist() == [1] * 9 + [0] * 3
    assert (item["start_positions"], item["end_positions"], item["uid"]) == (5, 6, 0)


def test_windows_overlap_and_hold_the_answer_or_point_to_cls(tokenizer):
    context = "a b c d e f g h a b"
    questions = [asked(context, "e f"), asked(context, "a b c"), asked("a", "a")]
    dataset = dataset_of(questions, tokenizer)
    assert [(w.question, w.start, w.length, w.offset) for w in dataset.windows] == [
        *((0, 0, 7, 4), (0, 3, 7, 4)),
        *((1, 0, 7, 4), (1, 3, 7, 4)),
        (2, 0, 1, 4),
    ]
    items = [dataset[i] for i in range(len(dataset))]
    spans = [(int(item["start_positions"]), int(item["end_positions"])) for item in items]
    assert spans == [(8, 9), (5, 6), (4, 6), (0, 0), (4, 4)]


def test_each_token_has_most_context_in_one_window(tokenizer):
    dataset = dataset_of([asked("a b c d e f g h a b c d e")], tokenizer)
    seen = [
        window.start + i
        for window in dataset.windows
        for i in np.flatnonzero(window.is_max_context).tolist()
    ]
    assert sorted(seen) == list(range(13))
    for window in dataset.windows:
        for i in np.flatnonzero(window.is_max_context).tolist():
            token = window.start + i
            least = [
                min(token - w.start, w.start + w.length - 1 - token) + 0.01 * w.length
                for w in dataset.windows
                if w.start <= token < w.start + w.length
            ]
            assert min(i, window.length - 1 - i) + 0.01 * window.length == max(least)


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ("1895", "18 ##95"),
        ("1943", "19 ##43"),
        ("(1895-1943)", "( 18 ##95 - 19 ##43 )"),
        ("895", "( 18 ##95 - 19 ##43 )"),
        ("a (1895", "a ( 18 ##95"),
    ],
)
def test_the_span_of_an_answer_is_tightened(tokenizer, answer, tokens):
    dataset = dataset_of([asked("a (1895-1943) b", answer)], tokenizer, seq_length=20)
    item = dataset[0]
    span = item["text"][item["start_positions"] : item["end_positions"] + 1]
    assert [WORDS[i] for i in span] == tokens.split()


def test_a_window_without_room_is_refused(tokenizer):
    with problem("rows of 5 tokens"):
        dataset_of([asked("a")], tokenizer, seq_length=5)


def test_an_answer_without_tokens_is_named(tokenizer):
    with problem("'q' … no tokens", WrongDataError):
        dataset_of([asked("a \u200b b", "\u200b")], tokenizer)


def predicted(dataset, starts, ends, **options):
    """Predict with logits given as {(window, token of the row): logit}; others are 0."""
    logits = np.zeros((2, len(dataset), dataset.spec.seq_length), np.float32)
    for side, given in zip(logits, (starts, ends), strict=True):
        for at, logit in given.items():
            side[at] = logit
    return predict(dataset, *logits, spec=AnswerSpec(**options), token_texts=WORDS)


def texts_of(prediction):
    return [candidate.text for candidate in prediction.candidates]


def test_the_best_valid_span_is_the_answer(tokenizer):
    dataset = dataset_of([asked("A b (18 c) d")], tokenizer)
    # Best pairs: an end before its start, a token of the question, [CLS], [SEP], padding.
    starts = {(0, 0): 9, (0, 1): 8, (0, 5): 3, (0, 8): 4, (0, 11): 9}
    ends = {(0, 0): 9, (0, 2): 8, (0, 4): 7, (0, 8): 2, (0, 10): 8}
    (prediction,) = predicted(dataset, starts, ends, n_best_size=5)
    assert texts_of(prediction) == ["c) d", "b (18 c) d", "c", "b (18 c"]
    assert [candidate.score for candidate in prediction.candidates] == [12, 11, 6, 5]
    assert prediction.probabilities[0] == pytest.approx(
        1 / (1 + np.exp(-1) + np.exp(-6) + np.exp(-7))
    )
    assert (prediction.answer, prediction.null_score_diff) == ("c) d", 0)


def test_answers_are_distinct_and_at_most_n(tokenizer):
    dataset = dataset_of([asked("a b a")], tokenizer)
    logits = {(0, 4): 5, (0, 6): 5}
    (few,) = predicted(dataset, logits, logits, n_best_size=2)
    assert texts_of(few) == ["a", "a b a"]
    (many,) = predicted(dataset, logits, logits, n_best_size=7)
    assert texts_of(many) == ["a", "a b a", "a b", "b a", "b"]
    (short,) = predicted(dataset, logits, logits, n_best_size=7, max_answer_length=2)
    assert texts_of(short) == ["a", "a b", "b a", "b"]


def test_a_start_counts_in_the_window_with_most_context(tokenizer):
    dataset = dataset_of([asked("a b c d e f g h a b")], tokenizer)
    assert not dataset.windows[1].is_max_context[0]
    (prediction,) = predicted(dataset, {(1, 4): 9, (0, 7): 8}, {(1, 4): 9, (0, 7): 8})
    assert prediction.answer == "d"
    assert prediction.candidates[0].score == 16


def test_an_empty_list_of_candidates_is_filled(tokenizer):
    dataset = dataset_of([asked("a b")], tokenizer)
    nothing = {(0, 0): 9}
    (first,) = predicted(dataset, nothing, nothing, n_best_size=1)
    assert texts_of(first) == ["empty"] and first.probabilities == [1]
    (second,) = predicted(dataset, nothing, nothing, n_best_size=1, version_2=True)
    assert texts_of(second) == ["empty", ""]
    assert second.answer == "" and second.null_score_diff == 18


@pytest.mark.parametrize(("threshold", "answer"), [(0.0, "a"), (-1.0, "a"), (-1.5, "")])
def test_no_answer_wins_over_the_threshold(tokenizer, threshold, answer):
    dataset = dataset_of([asked("a b c d e f g h a b")], tokenizer)
    # The lowest null score of the windows counts.
    starts = {(0, 0): 9, (1, 0): 2, (0, 4): 3}
    ends = {(0, 0): 9, (1, 0): 1, (0, 4): 1}
    (prediction,) = predicted(
        dataset,
        starts,
        ends,
        version_2=True,
        null_score_diff_threshold=threshold,
    )
    assert prediction.null_score_diff == -1
    assert (prediction.answer, "" in texts_of(prediction)) == (answer, True)


def by_trying_all_spans(dataset, starts, ends, n, longest, *, version_2):
    """Return the candidates of a dataset of one question, and the difference of the null score."""
    found = []
    for w, window in enumerate(dataset.windows):
        ranks = [
            {j: k for k, j in enumerate(sorted(range(12), key=lambda j: -x[w, j]))}
            for x in (starts, ends)
        ]
        for i in range(window.length):
            for j in range(i, min(i + longest, window.length)):
                at = (i + window.offset, j + window.offset)
                rank = ranks[0][at[0]], ranks[1][at[1]]
                if max(rank) < n and window.is_max_context[i]:
                    ids = dataset[w]["text"][at[0] : at[1] + 1]
                    text = " ".join(WORDS[k] for k in ids)
                    found.append(
                        (float(starts[w, at[0]]) + float(ends[w, at[1]]), (w, *rank), text)
                    )
    null = min(float(starts[w, 0]) + float(ends[w, 0]) for w in range(len(dataset)))
    if version_2:
        found.append((null, (len(dataset),), ""))
    texts = list(dict.fromkeys(t for *_, t in sorted(found, key=lambda f: (-f[0], f[1]))))[:n]
    if version_2 and "" not in texts:
        texts.append("")
    if texts in ([], [""]):
        texts.insert(0, "empty")
    best = max((score for score, _, text in found if text), default=0)
    return texts, null - best if version_2 else 0


@pytest.mark.parametrize("version_2", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_candidates_equal_those_of_trying_all_spans(tokenizer, seed, version_2):
    rng = np.random.default_rng(seed)
    context = " ".join(rng.choice([*"abc"], rng.integers(1, 15)))
    dataset = dataset_of([asked(context)], tokenizer)
    logits = rng.integers(-5, 6, (2, len(dataset), 12)) / 2
    n, longest = int(rng.integers(1, 13)), int(rng.integers(1, 5))
    spec = AnswerSpec(n, longest, version_2)
    (prediction,) = predict(dataset, *logits, spec=spec, token_texts=WORDS)
    texts, difference = by_trying_all_spans(dataset, *logits, n, longest, version_2=version_2)
    assert (texts_of(prediction), prediction.null_score_diff) == (texts, difference)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("steve smith", "Steve Smith's", "Steve Smith"),
        ("1895", "(1895-1943)", "1895"),
        ("cafe", "Caf\u00e9!", "Caf\u00e9"),
        ("b", "A  B", "B"),
        ("\u4e2d", "a\u4e2d\u6587", "\u4e2d"),
        ("c", "A B", "A B"),
        ("", "A B", "A B"),
        ("x", "\ufb01x\u0301", "\ufb01x\u0301"),
        ("a b", "a\ufffd b", "a\ufffd b"),
    ],
)
def test_the_text_of_an_answer_is_that_of_the_context(text, words, expected):
    assert original_text(text, words, lower_case=True) == expected


def test_case_counts_where_the_tokenizer_keeps_it():
    assert original_text("smith", "Smith's", lower_case=False) == "Smith's"
    assert original_text("Smith", "Smith's", lower_case=False) == "Smith"


def test_prediction_files(tmp_path, tokenizer):
    dataset = dataset_of([asked("a b", uid="q1"), asked("C d", uid="q2")], tokenizer)
    predictions = predicted(dataset, {(0, 4): 1, (1, 4): 1}, {(0, 4): 1, (1, 4): 1}, version_2=True)
    write_predictions(tmp_path, predictions)
    files = ("predictions", "null_odds", "test_prediction", "test_nbest")
    official, odds, nemo, n_best = (json.loads((tmp_path / f"{f}.json").read_text()) for f in files)
    assert official == {"q1": "a", "q2": "C"}
    assert odds == {"q1": -2, "q2": -2}
    assert nemo == {"q1": ["g h", "a"], "q2": ["g h", "C"]}
    keys = {"question", "text", "probability", "start_logit", "end_logit"}
    assert set(n_best["q2"][0]) == keys and n_best["q2"][0]["text"] == "C"


def answer_set(folder, span, tokenizer, version_2=False):
    """Return a task, and the predictions of a file whose only question has the id q1."""
    file = squad_file(folder / "dev.json", entry())
    task = AnswerTask(TextTaskPlan(max_query_length=2, has_unanswerable=version_2))
    data = task.data([file], tokenizer=tokenizer, seq_length=12, trains=False)
    logits = np.zeros((len(data), 12, 2))
    for column, token in enumerate(span):
        logits[:, data.windows[0].offset + token, column] = 5.0
    return task, Predicted(data, logits)


def test_questions_of_two_files_may_have_the_same_id(tmp_path, tokenizer):
    task, right = answer_set(tmp_path, (1, 2), tokenizer)
    _, wrong = answer_set(tmp_path, (3, 3), tokenizer)
    assert [task.metrics([each])["exact"] for each in (right, wrong)] == [100, 0]
    assert task.metrics([right, wrong])["exact"] == task.metrics([wrong, right])["exact"] == 50


def test_thresholds_are_reported_of_squad_2(tmp_path, tokenizer):
    task, predicted = answer_set(tmp_path, (1, 2), tokenizer, version_2=True)
    metrics = task.metrics([predicted])
    assert {"best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"} <= {*metrics}
    assert "best_f1_thresh" in task.table([predicted])
    task, predicted = answer_set(tmp_path, (1, 2), tokenizer)
    assert {*task.metrics([predicted])} == {"exact", "f1", "HasAns_exact", "HasAns_f1"}


@pytest.mark.parametrize(
    ("prediction", "answers", "first", "second"),
    [
        ("", ["the"], (1, 0), (1, 1)),
        ("the", ["%", "a b"], (1, 0), (0, 0)),
        ("b", ["the", "b"], (1, 1), (1, 1)),
        ("x", ["%"], (0, 0), (0, 0)),
    ],
)
def test_texts_without_words_are_scored_by_the_rules_of_each_evaluation(
    prediction, answers, first, second
):
    for rules, expected in (("1.1", first), ("2.0", second)):
        found = (f(prediction, answers, rules) for f in (exact_match, answer_f1))
        assert tuple(found) == expected


def test_the_rules_of_the_scores_are_named(tmp_path, tokenizer):
    task, predicted = answer_set(tmp_path, (1, 2), tokenizer)
    assert task.table([predicted]).splitlines()[0] == "answers (rules of SQuAD 1.1)"


def test_a_file_of_answers_is_of_one_file_of_questions():
    words = ("--valid-data", "a", "b", "--output-nbest-file", "c", "--save", "d")
    config = tiny_config(*words, "--task", "question-answering")
    with problem("--output-nbest-file c … one file … --valid-data … 2"):
        validate(config, world_size=1, device="cpu", objective="question-answering")
