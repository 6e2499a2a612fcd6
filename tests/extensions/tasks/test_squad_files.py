"""Files of SQuAD are read as by BERT's code; wrong ones are named."""

import json
import re

import pytest
from problems import problem
from squad_files import entry, squad_file

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.squad import Question, read_squad


def test_questions_are_read(tmp_path):
    file = squad_file(
        tmp_path / "train.json",
        entry(),
        entry(uid="q2", text=None, is_impossible=True),
        entry(uid="q3", text="B  C", start=0, context="", is_impossible=False),
    )
    first, second, third = read_squad(file, is_training=False, version_2=True)
    assert first == Question("q1", "e f", "a b c d", ("b c",), 2)
    assert second == Question("q2", "e f", "a b c d", is_impossible=True)
    assert third.answers == ("B  C",)
    (only,) = read_squad(squad_file(tmp_path / "one.json", entry()), is_training=True)
    assert only.answer_start == 2


def test_answers_to_compare_with_need_no_position(tmp_path):
    file = squad_file(tmp_path / "dev.json", entry(start=9), entry(uid="q2"))
    data = json.loads(file.read_text())
    del data["data"][0]["paragraphs"][0]["qas"][1]["answers"][0]["answer_start"]
    file.write_text(json.dumps(data))
    questions = read_squad(file, is_training=False)
    assert [question.answers for question in questions] == [("b c",)] * 2
    assert [question.answer_start for question in questions] == [None, None]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (entry(is_impossible="False"), "is_impossible … 'False' … true or false"),
        (entry(text=None), "no answer … --version-2-with-negative"),
        (entry(question=" "), "question is empty"),
        (entry(question=3), "question is empty"),
        (entry(answers=[{"text": "b"}]), "answers … text … answer_start"),
        (entry(answers=["b"]), "answers … text … answer_start"),
        (entry(uid=""), "id is missing"),
    ],
)
def test_a_wrong_question_is_named_with_its_place(tmp_path, wrong, words):
    file = squad_file(tmp_path / "train.json", entry(uid="q0"), wrong, indent=1)
    with problem(words, WrongDataError) as error:
        read_squad(file, is_training=True)
    uid = wrong["id"]
    line = file.read_text().split(f'"{uid}"')[0].count("\n") + 1
    place = f"line {line}, article 1 ('t'), paragraph 1, question '{uid}': "
    assert str(error.value).startswith(f"{file}, {place}")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (entry(start=4), "the answer 'b c' is not in the context at 4: 'c d'"),
        (entry(start=40), "not in the context at 40"),
        (entry(start=-3), "not in the context at -3"),
        (entry(text=" "), "the answer ' ' is not in the context"),
    ],
)
def test_a_misplaced_answer_is_skipped_and_counted(tmp_path, caplog, wrong, problem):
    file = squad_file(tmp_path / "train.json", entry(uid="q0"), wrong, indent=1)
    (only,) = read_squad(file, is_training=True)
    assert only.uid == "q0"
    place = r"1 questions skipped, .*line \d+, article 1 \('t'\), paragraph 1, question 'q1': .*"
    assert re.search(place + re.escape(problem), caplog.text)
    assert len(read_squad(file, is_training=False)) == 2


@pytest.mark.parametrize(
    ("right", "wrong", "is_read"), [(18, 2, True), (17, 2, False), (0, 1, False)]
)
def test_more_than_a_tenth_of_misplaced_answers_are_refused(tmp_path, right, wrong, is_read):
    entries = [entry(uid=f"q{i}", start=2 if i < right else 4) for i in range(right + wrong)]
    file = squad_file(tmp_path / "train.json", *entries)
    if is_read:
        assert len(read_squad(file, is_training=True)) == right
        return
    with problem(f"{wrong} of {right + wrong} … 10% … 'q{right}'", WrongDataError):
        read_squad(file, is_training=True)


def test_the_first_answer_that_is_at_its_position_is_learned(tmp_path):
    answers = [{"text": "B C", "answer_start": 2}, {"text": "c d", "answer_start": 4}]
    file = squad_file(tmp_path / "train.json", entry() | {"answers": answers})
    (question,) = read_squad(file, is_training=True)
    assert (question.answers, question.answer_start) == (("c d", "B C"), 4)


@pytest.mark.parametrize("is_training", [True, False])
def test_an_id_may_be_used_once(tmp_path, is_training):
    file = squad_file(tmp_path / "dev.json", entry(), entry())  # in one line
    with problem("article 1 … paragraph 1 … 'q1' … twice", WrongDataError):
        read_squad(file, is_training=is_training)


def test_a_wrong_file_is_named(tmp_path):
    file = tmp_path / "train.json"
    for content, words in [
        ('{"data": [', "line 1 … JSON"),
        ("[]", "'data' is missing … SQuAD"),
        ('{"data": 3}', "'data' … list"),
        ('{"data": [{"title": "A"}]}', "article 1 ('A') … 'paragraphs' is missing"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": []}, {"qas": [{"id": 1}]}]}]}',
            "article 1, paragraph 2 … 'context'",
        ),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', "paragraph 1 … 'qas'"),
        ('{"data": []}', "no question"),
    ]:
        file.write_text(content)
        with problem(words, WrongDataError) as error:
            read_squad(file, is_training=True)
        assert str(file) in str(error.value)
    with problem("did you mean … train.json", WrongDataError):
        read_squad(tmp_path / "trian.json", is_training=True)
    with problem("context is empty", WrongDataError):
        read_squad(squad_file(file, entry(), context=" \n"), is_training=True)


def test_white_space_between_the_words_of_an_answer_does_not_matter(tmp_path):
    file = squad_file(tmp_path / "train.json", entry(text="b  c"), context="a b\t\nc d")
    (question,) = read_squad(file, is_training=True)
    assert question.answer_start == 2
