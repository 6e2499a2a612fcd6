"""Conversations as prompts: the tokens of transformers, and the end of an answer."""

import pytest
from chat_models import SPECIAL, TURN_END, write_tokenizer
from problems import problem
from tokenizers import processors

from megatron.common.errors import DataError
from megatron.tokenizer.chat import ChatTemplate, read_chat_template
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.special import added_tokens, encode_alone, special_tokens
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "the 日本"}, {"role": "user", "content": "a <b>"}]


class Bytes(Tokenizer):
    """A token for each byte, behind a token that begins texts."""

    name, vocab_size, special_ids = "bytes", 258, {"eod": 256, "bos": 257}

    def encode(self, text):
        return [257, *text.encode()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("chat_tokenizer"))


@pytest.fixture(scope="module")
def prompts(folder):
    return ChatPrompts(PretrainedFromHF(folder), read_chat_template(None, str(folder)))


def test_tokens_are_those_of_transformers(folder, prompts):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True
    )
    assert prompts.encode(MESSAGES) == theirs["input_ids"]


def test_the_special_token_behind_an_answer_ends_it(prompts):
    assert (prompts.stop_tokens, prompts.stop_strings) == ({TURN_END}, ())


@pytest.mark.parametrize(
    ("source", "stops"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ("\nuser:",)),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", ("][",)),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ()),
        ("{{ messages[-1].content }}", ()),
        ("{{ raise_exception('no') }}", ()),
    ],
)
def test_the_text_behind_an_answer_ends_it_where_no_token_does(source, stops):
    found = ChatPrompts(Bytes(), ChatTemplate(source))
    assert (found.stop_tokens, found.stop_strings) == (set(), stops)


def test_a_template_of_one_question_alone_has_an_end_too(folder):
    source = (
        "{% if messages|length > 2 %}{{ raise_exception('one question') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    found = ChatPrompts(PretrainedFromHF(folder), ChatTemplate(source))
    assert found.stop_tokens == {TURN_END}
    with problem("refuses … one question", DataError):
        found.encode(MESSAGES * 2)


def test_what_a_tokenizer_adds_to_texts_is_not_added_to_a_conversation(tmp_path):
    folder = write_tokenizer(tmp_path)
    tokenizer = PretrainedFromHF(folder)
    plain = tokenizer.encode("the")
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[(text, position) for position, text in enumerate(SPECIAL)],
    )
    assert tokenizer.encode("the") == [0, *plain, TURN_END]
    assert encode_alone(tokenizer)("the") == plain
    assert encode_alone(Bytes())("ab") == [*b"ab"]


def test_special_tokens_are_those_of_the_vocabulary_and_the_added_ones(folder):
    tokenizer = PretrainedFromHF(folder)
    assert special_tokens(tokenizer) == added_tokens(tokenizer) == {0, 1, 2}
    tokenizer.backend.add_tokens(["<plain>"])
    plain = tokenizer.backend.token_to_id("<plain>")
    assert special_tokens(tokenizer) == {0, 1, 2}
    assert added_tokens(tokenizer) == {0, 1, 2, plain}
    assert special_tokens(Bytes()) == {256, 257}
