"""Questions of InstructRetro: files, prompts, and the scores of answers."""

import json

import pytest
from bytes_tokenizer import BytesTokenizer
from problems import problem

from megatron.common.errors import WrongDataError
from megatron.extensions.retro.data_questions import (
    Prompts,
    QAItem,
    answer_scores,
    encoder_contexts,
    items_in_range,
    question_set_of,
    read_qa_items,
)

SYSTEM = (
    "System: This is a chat between a user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions"
)


class Bytes(BytesTokenizer):
    eod = 256

    def decode(self, ids):
        return bytes(ids).decode()


@pytest.fixture
def read(tmp_path):
    def read(*entries, longform=False, **options):
        file = tmp_path / "questions.json"
        lines = [json.dumps(entry) for entry in entries]
        file.write_text("\n".join(lines) + "\n" if longform else f"[{','.join(lines)}]")
        options = {"is_retrieved": False, "is_longform": longform} | options
        return read_qa_items(file, **options)

    return read


@pytest.mark.parametrize(
    ("entry", "answers"),
    [
        ({"answer": " one "}, ("one",)),
        ({"answer": 7}, ("7",)),
        ({"answer": ["a", "b"]}, ("a", "b")),
        ({"answers": [{"text": "x"}, {"text": "y"}]}, ("x", "y")),
        ({"answers": ["x"], "answer": "z"}, ("x",)),
    ],
)
def test_answers_have_several_forms(entry, answers, read):
    (item,) = read({"question": "Q?", **entry}, {"question": "none", "answers": []})
    assert item.answers == answers
    everything = read({"question": "none"}, needs_answers=False)
    assert everything == [QAItem("none", (), ("title: , source: ",))]


@pytest.mark.parametrize(
    ("entry", "is_retrieved", "contexts"),
    [
        ({"sub-paragraphs": "text"}, False, ("title: , source: text",)),
        ({"sub-paragraphs": ["T", "text"]}, False, ("title: T, source: text",)),
        ({"sub_paragraph": "text", "ctxs": []}, False, ("title: , source: text",)),
        ({"ctxs": [{"title": "T", "text": "x"}, {"text": "y"}]}, True, ("T", "x", "", "y")),
        ({"bert_pretrain_corpus_neighbours": ["x", "y"]}, True, ("", "x", "", "y")),
        ({"ctxs": []}, True, ("title: , source: ",)),
    ],
)
def test_contexts_have_several_forms(entry, is_retrieved, contexts, read):
    if len(contexts) == 4:
        a, b, c, d = contexts
        contexts = (f"title: {a}, source: {b}", f"title: {c}, source: {d}")
    (item,) = read({"question": "Q?", "answer": "A", **entry}, is_retrieved=is_retrieved)
    assert item.contexts == contexts


def test_choices_are_part_of_the_question(read):
    choices = {"qa_type": "multi_choice_qa", "multichoice_options": ["red", "blue"]}
    (item,) = read({"question": "Q?", "answer": "A", **choices})
    assert item.question == "Q?\nChoose one based on the following options: (A) red (B) blue"


def test_long_answers_are_json_lines(read):
    (item,) = read({"question": "Q?", "longform_answer": "Long.", "answer": "B"}, longform=True)
    assert item.answers == ("Long.",)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"answer": "A"}, "entry 1 … question"),
        ({"question": "Q", "answer": "A"}, "ctxs … bert_pretrain_corpus_neighbo"),
        ({"question": "Q", "ctxs": [3]}, "ctxs … texts … title"),
        ({"question": "Q", "ctxs": ["x"]}, "no question … answer"),
        ({"question": "Q", "qa_type": "multi_choice_qa"}, "multi_choice_qa … multichoice_options"),
    ],
)
def test_malformed_questions_are_refused(entry, message, read):
    with problem(message, WrongDataError):
        read(entry, is_retrieved=True)


def test_files_that_cannot_be_read_are_refused(tmp_path, read):
    with problem("cannot read … no.json", WrongDataError):
        read_qa_items(tmp_path / "no.json", is_retrieved=False)
    (tmp_path / "object.json").write_text("{}")
    with problem("object.json … JSON list", WrongDataError):
        read_qa_items(tmp_path / "object.json", is_retrieved=False)


ITEM = QAItem("Who?", ("Ann",), ("title: , source: one", "title: , source: two"))


def text_of(name, *, room=10**6, item=ITEM, **options):
    options = {"num_contexts": 1, "retrieves": True} | options
    prompts = Prompts(tokenizer=Bytes(), name=name, **options)
    return Bytes().decode(prompts.tokens(item, room))


def test_the_name_of_the_set_decides_the_turn():
    short = "User: Who? Answer the above question with a short phrase.\n\nAssistant: The answer is"
    system, one = f"{SYSTEM}.\n\n", "title: , source: one\n\n"
    assert text_of("nq") == f"{system}{one}{short}"
    assert text_of("NarrativeQA") == f"{system}{one}{short}"
    turn = "User: Who? Answer the above question with {}.\n\nAssistant:"
    assert text_of("BoolQ") == f"{system}{one}{turn.format('True or False')}"
    assert text_of("eli5") == f"{system}{one}{turn.format('a long complete answer')}"
    assert text_of("doc2dial") == f"{system}{one}Who?"
    assert text_of("oasst") == text_of("oasst-skip-code") == f"{system}Who?"
    both = f"{one}title: , source: two\n\n"
    assert text_of("nq", num_contexts=5) == f"{system}{both}{short}"
    assert text_of("nq", num_contexts=0) == f"{system}{short}"
    assert text_of("nq", is_short=True) == f"{one}Question: Who? Answer: The answer is"
    of_gpt = text_of("oasst", retrieves=False)
    assert of_gpt.startswith(f"{SYSTEM} based on the context. The assistant should also indicate")


def test_contexts_are_cut_from_the_right_to_leave_room():
    full = text_of("nq")
    assert text_of("nq", room=len(full)) == full
    cut = text_of("nq", room=len(full) - 4)
    assert cut == full.replace("source: one\n\n", "source: o")
    assert text_of("nq", room=3) == text_of("nq", num_contexts=0)


def test_the_encoder_reads_contexts_of_their_own():
    tokens = encoder_contexts(ITEM, Bytes(), first=1, count=2, length=9)
    assert [bytes(text) for text in tokens] == [b"title: , ", b""]
    empty = QAItem("Q", (), ("title: , source: ",))
    assert encoder_contexts(empty, Bytes(), first=0, count=1, length=9) == [[]]


def test_the_set_is_named_by_the_file():
    assert question_set_of("data/x/nq_QA_dev.json") == "nq"
    assert question_set_of("data/tqa/test.json") == "tqa"


def test_a_range_of_questions():
    items = [QAItem(str(i), (), ()) for i in range(4)]
    assert items_in_range(items, 1, 2) == items[1:3]
    assert items_in_range(items, 1, None) == items[1:]
    for first, count in ((4, None), (2, 3)):
        with problem("4 questions", WrongDataError):
            items_in_range(items, first, count)


def test_scores_are_the_golden_ones():
    eiffel = QAItem("Q", ("Eiffel Tower",), ())
    assert answer_scores(["the Eiffel Tower in Paris"], [eiffel]) == {
        "exact_match": 0.0,
        "f1": pytest.approx(2 / 3),
    }


def test_both_scores_normalize_alike():
    """Punctuation is deleted in both: "U.S." is one word, also where it is not the first answer."""
    items = [QAItem("Q", ("United States", "the U.S."), ()), QAItem("Q", ("U.S.",), ())]
    scores = answer_scores(["US", "us!"], items)
    assert scores == {"exact_match": 1.0, "f1": 0.5}
