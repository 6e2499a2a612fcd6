"""The server's interfaces in the hands of OpenAI's client and of LangChain."""

import openai
import pytest
from chat_models import SPEC, write_tokenizer
from langchain_openai import ChatOpenAI, OpenAI
from problems import problem
from servers import serving

from megatron.tokenizer.chat import read_chat_template
from megatron.tokenizer.types.hugging_face import PretrainedFromHF

KEY = "sesame"
MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def running(group, tmp_path_factory):
    tokenizer = PretrainedFromHF(write_tokenizer(tmp_path_factory.mktemp("chat_tokenizer")))
    template = read_chat_template(None, tokenizer.name)
    with serving(group, spec=SPEC, tokenizer=tokenizer, chat=template, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def address(running):
    return f"http://127.0.0.1:{running.port}/v1"


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with problem("'gpt-4' … 'tiny'", openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with problem("no such path", openai.NotFoundError) as caught:
        client.embeddings.create(model="tiny", input="a")
    assert caught.value.code is None
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=str(client.base_url), api_key="x", max_retries=0).models.list()


def test_completions(client):
    request = {"model": "tiny", "prompt": "the", "max_tokens": 6, "seed": 3, "logprobs": 2}
    full = client.completions.create(**request, n=2, echo=True)
    assert len(full.choices) == 2 and full.usage.completion_tokens <= 12
    reported = full.choices[0].logprobs
    assert reported.top_logprobs[0] is None and reported.text_offset[0] == 0
    assert len(reported.tokens) == len(reported.token_logprobs) == len(reported.text_offset)
    once = client.completions.create(**request)
    events = client.completions.create(
        **request, stream=True, stream_options={"include_usage": True, "include_obfuscation": True}
    )
    *parts, last = events
    assert "".join(part.choices[0].text for part in parts) == once.choices[0].text
    assert last.usage == once.usage
    further = client.completions.create(
        **request,
        best_of=2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={"5": 2},
        user="me",
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2},
    )
    assert further.choices[0].finish_reason in ("stop", "length")
    with problem("no_such_field … no such field", openai.BadRequestError):
        client.completions.create(**request, extra_body={"no_such_field": 1})


def test_chat(client):
    request = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 3}
    full = client.chat.completions.create(**request, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.role for choice in full.choices] == ["assistant"] * 2
    tokens = full.choices[0].logprobs.content
    assert all(len(token.top_logprobs) in (2, 3) for token in tokens)
    once = client.chat.completions.create(**request)
    with client.chat.completions.stream(**request) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        snapshot = stream.current_completion_snapshot.choices[0]
    assert "".join(deltas) == once.choices[0].message.content == snapshot.message.content
    assert snapshot.finish_reason == once.choices[0].finish_reason
    with problem("tools … calls no tools", openai.BadRequestError):
        client.chat.completions.create(
            **request, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_langchain_completions(address):
    model = OpenAI(model="tiny", base_url=address, api_key=KEY, max_tokens=5, seed=1, max_retries=0)
    text = model.invoke("the")
    assert isinstance(text, str) and "".join(model.stream("the")) == text
    assert len(model.batch(["the", "a"])) == 2
    several = OpenAI(
        model="tiny", base_url=address, api_key=KEY, max_tokens=5, n=2, best_of=3, max_retries=0
    )
    assert len(several.generate(["the"]).generations[0]) == 2


def test_langchain_chat(address):
    model = ChatOpenAI(
        model="tiny", base_url=address, api_key=KEY, max_tokens=6, seed=1, max_retries=0
    )
    reply = model.invoke("the cat")
    assert reply.response_metadata["finish_reason"] in ("stop", "length")
    assert reply.usage_metadata["output_tokens"] <= 6
    assert "".join(part.content for part in model.stream("the cat")) == reply.content
    drawn = model.bind(logprobs=True, top_logprobs=1).invoke([("system", "a"), ("human", "b")])
    assert drawn.response_metadata["logprobs"]["content"] is not None
    with problem("calls no tools", openai.BadRequestError):
        model.bind_tools([{"type": "function", "function": {"name": "f"}}]).invoke("a")
