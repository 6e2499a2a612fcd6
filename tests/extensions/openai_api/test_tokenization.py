"""POST /tokenize and /detokenize: what requests of generation would read, and back."""

import pytest
from chat_models import SPEC, TEMPLATE, write_tokenizer
from problems import require_problem
from servers import serving

from megatron.tokenizer.chat import ChatTemplate, read_chat_template
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.hugging_face import PretrainedFromHF

MESSAGES = [{"role": "user", "content": "the é?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return PretrainedFromHF(write_tokenizer(tmp_path_factory.mktemp("chat_tokenizer")))


@pytest.fixture(scope="module")
def running(group, tokenizer):
    template = read_chat_template(None, tokenizer.name)
    with serving(group, spec=SPEC, tokenizer=tokenizer, chat=template) as running:
        yield running


def post(running, path, **fields):
    return running.send("POST", path, fields)


def test_texts_of_more_tokens_than_a_request_may_have_are_refused(running):
    most = running.served.limits.request_tokens
    long = {"prompt": "é" * most}
    assert post(running, "/tokenize", **long).json["count"] > most
    reply = post(running, "/tokenize", return_token_strs=True, **long)
    assert reply.status == 400
    require_problem(f"return_token_strs … more than {most}", [reply.json["error"]["message"]])


@pytest.mark.parametrize("model", [{}, {"model": "tiny"}, {"model": None}])
def test_a_text_and_back(running, tokenizer, model):
    text = "Be brief. é"
    reply = post(running, "/tokenize", prompt=text, return_token_strs=True, **model).json
    assert reply["tokens"] == tokenizer.encode(text)
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    # Of a part of a character there is no text.
    assert "".join(reply["token_strs"]) == "Be brief. \ufffd\ufffd"
    assert reply["max_model_len"] == running.served.engine_thread.engine.max_length
    back = post(running, "/detokenize", tokens=reply["tokens"], **model)
    assert back.json == {"prompt": text}
    assert post(running, "/tokenize", prompt="").json["tokens"] == tokenizer.encode("")
    assert post(running, "/detokenize", tokens=[]).json == {"prompt": ""}


def test_a_conversation_is_what_chat_completions_read(running, tokenizer):
    reply = post(running, "/tokenize", messages=MESSAGES).json
    assert reply["tokens"] == ChatPrompts(tokenizer, ChatTemplate(TEMPLATE)).encode(MESSAGES)
    assert reply["token_strs"] is None
    usage = running.chat(messages=MESSAGES, max_tokens=1).json["usage"]
    assert usage["prompt_tokens"] == reply["count"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {}, "give prompt … or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "give prompt … or messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "chat template"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "answer begins"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens: … vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_is_wrong_is_400_and_named(running, path, fields, message):
    reply = post(running, path, **fields)
    assert reply.status == 400
    require_problem(message, [reply.json["error"]["message"]])


@pytest.mark.parametrize(
    ("path", "fields"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
def test_another_model_is_404(running, path, fields):
    reply = post(running, path, model="other", **fields)
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
