"""POST /v1/chat/completions: prompts by the template, answers that end with their turn."""

import pytest
from chat_models import EOD, SPEC, TEMPLATE, TURN_END, write_tokenizer
from problems import require_problem
from servers import serving
from stages import plainly_continued, random_model

from megatron.tokenizer.chat import ChatTemplate, read_chat_template
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.hugging_face import PretrainedFromHF

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the é?"}]
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return PretrainedFromHF(write_tokenizer(tmp_path_factory.mktemp("chat_tokenizer")))


@pytest.fixture(scope="module")
def running(group, tokenizer):
    template = read_chat_template(None, tokenizer.name)
    with serving(group, spec=SPEC, tokenizer=tokenizer, chat=template) as running:
        yield running


@pytest.fixture(scope="module")
def answer(group, tokenizer):
    """The most likely tokens behind MESSAGES."""
    prompt = ChatPrompts(tokenizer, ChatTemplate(TEMPLATE)).encode(MESSAGES)
    return plainly_continued(random_model(group, SPEC), SPEC, prompt, 8, stops=[EOD, TURN_END])


def test_an_answer_is_what_the_network_says_behind_the_template(running, tokenizer, answer):
    reply = running.chat(**GREEDY).json
    (choice,) = reply["choices"]
    shown = [token for token in answer if token > TURN_END]
    message = {"role": "assistant", "content": tokenizer.decode(shown), "refusal": None}
    assert choice["message"] == message and choice["logprobs"] is None
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    read = len(ChatPrompts(tokenizer, ChatTemplate(TEMPLATE)).encode(MESSAGES))
    usage = {"prompt_tokens": read, "completion_tokens": len(answer)}
    assert reply["usage"] == usage | {"total_tokens": read + len(answer)}
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "é?"}]
    in_parts = [MESSAGES[0], {"role": "user", "content": parts}]
    same = running.chat(**(GREEDY | {"messages": in_parts})).json
    assert same["choices"] == reply["choices"]


@pytest.mark.parametrize("end", [TURN_END, EOD])
def test_the_end_of_the_turn_ends_the_answer(running, end):
    request = GREEDY | {"logit_bias": {str(end): 100}}
    reply = running.chat(**request, logprobs=True).json
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["content"] == []
    assert reply["usage"]["completion_tokens"] == 1
    ignored = running.chat(**request, ignore_eos=True).json
    assert ignored["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "seed": 5, "temperature": 1},
        {"logprobs": True, "top_logprobs": 2, "seed": 3, "temperature": 2},
        {"logprobs": True, "max_completion_tokens": 0, "max_tokens": None},
        {"stop": ["e", "\ufffd"], "seed": 1, "temperature": 1},
    ],
    ids=str,
)
def test_a_stream_brings_what_one_answer_does(running, fields):
    request = GREEDY | fields
    full = running.chat(**request).json
    usage = {"include_usage": True, "include_obfuscation": True}
    *chunks, last = running.chat(**request, stream=True, stream_options=usage).events
    assert last["choices"] == [] and last["usage"] == full["usage"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("obfuscation" in chunk for chunk in chunks)
    for choice in full["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in one["delta"] for one in own[1:])
        assert own[-1]["delta"] == {}
        text = "".join(one["delta"].get("content", "") for one in own)
        assert text == choice["message"]["content"]
        reasons = [one["finish_reason"] for one in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
        tokens = [token for one in own for token in (one["logprobs"] or {"content": []})["content"]]
        assert [t["token"] for t in tokens] == [
            t["token"] for t in (choice["logprobs"] or {"content": []})["content"]
        ]


def test_log_probabilities_have_the_shape_of_chat(running):
    request = GREEDY | {"temperature": 3, "seed": 1, "logprobs": True}
    content = running.chat(**request, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert content
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        is_whole = "\ufffd" not in token["token"]
        assert token["bytes"] == ([*token["token"].encode()] if is_whole else None)
        values = [one["logprob"] for one in token["top_logprobs"]]
        assert len(values) in (2, 3) and token["logprob"] in values
    none = running.chat(**request).json["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in none] == [[]] * len(none)


def test_an_answer_without_a_limit_may_fill_the_room(running):
    bias = {str(token): -100 for token in (EOD, TURN_END)}
    request = {"messages": MESSAGES, "temperature": 0, "logit_bias": bias}
    reply = running.chat(**request).json
    assert reply["usage"]["completion_tokens"] == 48, "the most that the server allows"
    request["messages"] = [{"role": "user", "content": "x" * 90}]
    reply = running.chat(**request).json
    assert reply["usage"]["total_tokens"] == SPEC.positions.max_position_embeddings


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"tools": [{"type": "function"}]}, "tools … leave it out"),
        ({"tool_choice": "auto"}, "tool_choice … leave it out"),
        ({"functions": []}, "functions … tools"),
        ({"response_format": {"type": "json_object"}}, "response_format … does not"),
        ({"audio": {}}, "audio … text alone"),
        ({"modalities": ["text", "audio"]}, "modalities … text alone"),
        ({"reasoning_effort": "low"}, "reasoning_effort … no reasoning"),
        ({"store": True}, "store … nothing"),
        ({"web_search_options": {}}, "web_search_options … nothing"),
        ({"messages": []}, "messages … at least 1"),
        ({"messages": [{"role": "user"}]}, "messages.0.content … missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content … text"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role … calls no"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages.0.tool_calls … leave it out",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "'image_url' … text alone",
        ),
        ({"top_logprobs": 2}, "top_logprobs … logprobs: true"),
        ({"max_completion_tokens": 9}, "max_completion_tokens … give one"),
        ({"max_tokens": 49}, "49 … 48"),
        ({"messages": [{"role": "user", "content": "x" * 128}]}, "tokens and 8 new ones are more"),
        ({"model": "gpt-4"}, "'gpt-4' … 'tiny'"),
        ({"prompt": "a"}, "prompt … no such field"),
    ],
    ids=str,
)
def test_what_is_left_out_is_refused_by_name(running, fields, reported):
    reply = running.chat(**(GREEDY | fields))
    assert reply.status == (404 if "model" in fields else 400)
    require_problem(reported, [reply.json["error"]["message"]])


def test_what_changes_nothing_is_accepted(running):
    plain = running.chat(**GREEDY).json["choices"]
    fields = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "me",
    }
    assert running.chat(**GREEDY, **fields).json["choices"] == plain


def test_a_template_can_refuse_and_a_model_can_have_none(group, tokenizer):
    strict = ChatTemplate("{{ raise_exception('users first') }}")
    with serving(group, spec=SPEC, tokenizer=tokenizer, chat=strict) as running:
        refused = running.chat(**GREEDY)
        assert refused.status == 400
        require_problem("chat template … users first", [refused.body.decode()])
    with serving(group, spec=SPEC, tokenizer=tokenizer) as running:
        refused = running.chat(**GREEDY)
        assert refused.status == 400
        require_problem("no chat template … --chat-template", [refused.body.decode()])


def test_the_model_can_be_looked_up(running):
    listed = running.send("GET", "/v1/models").json["data"]
    assert listed == [running.send("GET", "/v1/models/tiny").json]
    for name in ("gpt-4", "org/gpt", "tiny/", "%C3%A9"):
        reply = running.send("GET", f"/v1/models/{name}")
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
