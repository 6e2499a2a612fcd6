"""Every body is answered, or refused with a list of its problems."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import send_on, serving

from megatron.tokenizer.chat import ChatTemplate

OPENAI = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running(group):
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with serving(group, chat=template) as running:
        yield running


@pytest.fixture(scope="module")
def connection(running):
    opened = running.connection()
    yield opened
    opened.close()


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
FRACTION = st.floats(0, 1) | st.sampled_from([0, 1, 1.5, -1])
SMALL = st.integers(-1, 12)
TEXT = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(
    ["", "\n", "a:", "\ud800", "a\udfff", "\0", "<eod>"]
)
MEGATRON = {
    "prompts": st.lists(TEXT, max_size=3),
    "tokens_to_generate": SMALL,
    "logprobs": st.booleans(),
    "temperature": st.floats(0, 101),
    "top_k": st.integers(-1, 300),
    "top_p": FRACTION,
    "top_p_decay": FRACTION,
    "top_p_bound": FRACTION,
    "add_BOS": st.booleans(),
    "stop_on_double_eol": st.booleans(),
    "stop_on_eol": st.booleans(),
    "prevent_newline_after_colon": st.booleans(),
    "random_seed": st.integers(-1, 2**70),
    "no_log": st.booleans(),
    "beam_width": st.integers(0, 10),
    "stop_token": st.integers(-1, 300),
    "length_penalty": st.floats(-12, 12),
    "max_len": SMALL,
}
COMPLETION = {
    "model": st.just("tiny"),
    "prompt": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(-1, 258), max_size=5),
    "max_tokens": SMALL,
    "temperature": st.floats(0, 101),
    "top_p": FRACTION,
    "n": st.integers(0, 3),
    "stop": TEXT | st.lists(TEXT, max_size=4),
    "logprobs": st.integers(-1, 6),
    "echo": st.booleans(),
    "seed": st.integers(-1, 2**70),
    "stream": st.booleans(),
    "user": TEXT,
    "best_of": st.integers(0, 4),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "repetition_penalty": st.floats(0, 101),
    "top_k": st.integers(-2, 2**70),
    "min_p": FRACTION,
    "logit_bias": st.dictionaries(
        st.integers(0, 260).map(str) | st.text(max_size=3), st.floats(-110, 110), max_size=2
    ),
    "stop_token_ids": st.lists(st.integers(-1, 258), max_size=3),
    "ignore_eos": st.booleans(),
    "min_tokens": SMALL,
    "skip_special_tokens": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "add_special_tokens": st.booleans(),
    "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    "suffix": TEXT,
}
CHAT = {name: field for name, field in COMPLETION.items() if name not in ("prompt", "echo")} | {
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "tool", ""]),
                "content": TEXT | st.just([{"type": "text", "text": "b"}]) | JUNK,
            }
        ),
        max_size=3,
    ),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "max_completion_tokens": SMALL,
    "tools": st.just([]) | st.none(),
}


def bodies(fields, *always):
    """Bodies that say some fields as they should be, and at times one that is not."""
    some = {name: of for name, of in fields.items() if name not in always}
    right = st.fixed_dictionaries({name: fields[name] for name in always}, optional=some)
    wrong = st.dictionaries(st.sampled_from(sorted(fields)) | TEXT, JUNK, max_size=1)
    few = st.sampled_from([0, 0, 0, 1])
    return st.builds(lambda a, b, wins: a | b if wins else a, right, wrong, few)


def require_answer_or_reason(reply, body):
    assert reply.status in (200, 400, 404), (reply, body)
    if reply.status == 200:
        return
    reported = reply.json["error"]
    reported = reported["message"] if isinstance(reported, dict) else reported
    assert reported.strip() and (reply.status == 400 or "model" in reported), (reply, body)


FUZZ = settings(max_examples=300, suppress_health_check=[*HealthCheck])


@FUZZ
@given(body=bodies(MEGATRON, "prompts") | JUNK)
def test_any_request_of_megatron_is_answered_or_refused(connection, body):
    require_answer_or_reason(send_on(connection, "PUT", "/api", body), body)


@FUZZ
@given(body=bodies(COMPLETION, "model", "prompt") | JUNK)
def test_any_request_of_openai_is_answered_or_refused(connection, body):
    require_answer_or_reason(send_on(connection, "POST", OPENAI, body), body)


@FUZZ
@given(body=bodies(CHAT, "model", "messages") | JUNK)
def test_any_conversation_is_answered_or_refused(connection, body):
    require_answer_or_reason(send_on(connection, "POST", CHAT_PATH, body), body)


@settings(max_examples=60, suppress_health_check=[*HealthCheck])
@given(raw=st.binary(max_size=40), path=st.sampled_from(["/api", OPENAI]))
def test_any_bytes_are_refused(connection, raw, path):
    method = "PUT" if path == "/api" else "POST"
    reply = send_on(connection, method, path, raw)
    require_answer_or_reason(reply, raw)
    assert reply.status == 400


REFUSED = [
    ({}, "prompts: is missing"),
    ({"prompts": "a"}, "prompts: Input should be a valid list (found 'a')"),
    ({"prompts": []}, "prompts: List should have at least 1 item"),
    ({"prompts": ["a"] * 9}, "9 prompts are more than 8"),
    ({"prompts": [1]}, "prompts.0: Input should be a valid string"),
    ({"prompts": ["\ud800"]}, "prompts.0: half of a surrogate pair"),
    ({"prompts": [""]}, "an empty text needs add_BOS"),
    ({"prompts": ["a"], "max_len": 3}, "max_len is no longer used: write tokens_to_generate"),
    ({"prompts": ["a"], "sentences": ["a"]}, "sentences is no longer used: write prompts"),
    ({"prompts": ["a"], "topk": 3}, "topk: there is no such field"),
    ({"prompts": ["a"], "tokens_to_generate": True}, "tokens_to_generate: Input should be a valid"),
    ({"prompts": ["a"], "tokens_to_generate": -1}, "greater than or equal to 0 (found -1)"),
    ({"prompts": ["a"], "tokens_to_generate": 0}, "0 needs logprobs"),
    ({"prompts": ["a"], "tokens_to_generate": 49}, "49 new tokens are more than 48"),
    ({"prompts": ["a" * 30], "tokens_to_generate": 40}, "more than the 64 tokens"),
    ({"prompts": ["a"] * 8, "tokens_to_generate": 48, "logprobs": False}, None),
    ({"prompts": ["aaa"] * 8, "tokens_to_generate": 48}, "408 tokens of all prompts"),
    ({"prompts": ["a"], "temperature": 0}, "temperature: Input should be greater than 0"),
    ({"prompts": ["a"], "temperature": 101}, "temperature: Input should be less than"),
    ({"prompts": ["a"], "temperature": 1}, None),
    ({"prompts": ["a"], "top_p": 1}, None),
    ({"prompts": ["a"], "top_k": 1001}, "top_k: Input should be less than or equal to 1000"),
    ({"prompts": ["a"], "top_k": 258}, "top_k: 258 is more than the vocabulary's 257"),
    ({"prompts": ["a"], "beam_width": 258}, "beam_width: 258 is more than the vocabulary's 257"),
    ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "top_k and top_p exclude each other"),
    ({"prompts": ["a"], "top_p_decay": 0.5}, "top_p_decay and top_p_bound need a top_p"),
    ({"prompts": ["a"], "top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound: 0.6 is more than"),
    ({"prompts": ["a"], "random_seed": -1}, "random_seed: Input should be greater than"),
    ({"prompts": ["a"], "logprobs": 1}, "logprobs: Input should be a valid boolean"),
    ({"prompts": ["a", "b"], "beam_width": 2}, "exactly 1 prompt, and there are 2"),
    ({"prompts": ["a"], "beam_width": 2, "stop_token": 257}, "stop_token: 257 is not in"),
]


@pytest.mark.parametrize(("body", "reported"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_body_is_refused(running, body, reported):
    reply = running.send("PUT", "/api", {"tokens_to_generate": 2} | body)
    assert reply.status == (400 if reported else 200)
    assert (reported or "") in (reply.json["error"] if reported else "")


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ({"prompt": 3}, "prompt: give a text, a list of texts"),
        ({"prompt": []}, "prompt: give a text"),
        ({"prompt": [[]]}, "prompt: a list of tokens is empty"),
        ({"prompt": [257]}, "a token is not in the vocabulary of 257"),
        ({"prompt": "a", "n": 0}, "n: Input should be greater than or equal to 1"),
        ({"prompt": "a", "n": 99}, "tokens of all prompts"),
        ({"prompt": "a", "stop": ""}, "stop: give at most 16 texts"),
        ({"prompt": "a", "stop": ["\ud800"]}, "stop: half of a surrogate pair"),
        ({"prompt": "a", "logprobs": 6}, "logprobs: Input should be less than or equal to 5"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty: Input should be less"),
        ({"prompt": "a", "messages": []}, "messages: there is no such field"),
        ({"prompt": "a", "best_of": 2, "n": 3}, "best_of: 2 is less than n, 3"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of: cannot be streamed"),
        ({"prompt": "a", "logit_bias": {"257": 1}}, "logit_bias: 257 is not in the vocabulary"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x: String should match pattern"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1: Input should be less than"),
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids: 300 is not in the vocab"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens: 17 is more than the 16 tokens"),
        ({"prompt": "a", "min_p": 1.5}, "min_p: Input should be less than or equal to 1"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty: Input should be greater"),
        ({"prompt": "a", "seed": -2}, "seed: Input should be greater than or equal to -1"),
        ({"prompt": "a", "suffix": "b"}, "suffix: this model was not trained for fill-in-the-mid"),
        ({"prompt": "a", "prompt_logprobs": 1}, "come with echo and logprobs; leave it out"),
        ({"prompt": "a", "response_format": {}}, "does not constrain the format of answers; leave"),
        ({"prompt": None}, "prompt: give a text"),
        ({"prompt": ["a", 1]}, "prompt: give a text"),
        ({"prompt": [1, -1]}, "prompt: give a text"),
    ],
)
def test_errors_have_the_format_of_openai(running, body, reported):
    reply = running.complete(**body)
    assert reply.status == 400
    assert reported in reply.json["error"]["message"]
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_a_field_that_is_null_counts_as_left_out(running):
    fields = {name: None for name in COMPLETION if name not in ("model", "prompt")}
    plain = running.complete(prompt="a", temperature=0)
    nulls = running.complete(**(fields | {"prompt": "a", "temperature": 0}))
    assert nulls.status == 200
    assert nulls.json["choices"] == plain.json["choices"]
    fields = {name: None for name in MEGATRON if name not in ("prompts", "max_len")}
    assert running.put(**(fields | {"prompts": ["a"], "top_k": 1})).status == 200
    assert "prompts: Input should be a valid list" in running.put(prompts=None).json["error"]


def test_a_body_that_is_no_json_object_is_refused(running):
    many_digits = b'{"prompts": ["a"], "tokens_to_generate": ' + b"9" * 9000 + b"}"
    for raw, reported in (
        (b"", "the body must be a JSON object"),
        (b"{", "the body is not JSON: Expecting property name"),
        (b"[]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b'{"a": "\xff"}', "the body is not UTF-8: byte 0xff at position 7"),
        (b'{"prompts": NaN}', "prompts: Input should be a valid list"),
        (b"[" * 15_000, "nested too deeply"),
        (many_digits, "an integer has too many digits"),
    ):
        reply = running.send("PUT", "/api", raw)
        assert reply.status == 400 and reported in reply.json["error"], (raw[:20], reply.json)
    reply = running.send("PUT", "/api", {"prompts": ["a"]}, **{"Content-Type": "text/plain"})
    assert reply.status == 400 and "Content-Type: application/json" in reply.json["error"]


def test_a_body_that_is_too_large_is_not_read(running):
    large = json.dumps({"prompts": ["a" * 30_000]}).encode()
    reported = running.send("PUT", "/api", large)
    assert (
        reported.status == 413 and reported.json["error"] == "the body is larger than 20000 bytes"
    )
    connection = running.connection()
    connection.putrequest("PUT", "/api")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    # No more than the server reads: it would reset a connection with unread bytes.
    for start in range(0, 21_000, 1000):
        connection.send(b"3e8\r\n" + large[start : start + 1000] + b"\r\n")
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("host", ["[", "[x]:y", "a/v1/"])
def test_a_host_that_is_none_changes_no_answer(running, host):
    reply = running.send("PUT", "/api", {}, Host=host)
    assert reply.status == 400 and reply.json["error"] == "prompts: is missing"
    reply = running.send("POST", OPENAI, {"prompt": "a"}, Host=host)
    assert reply.status == 400 and reply.json["error"]["message"] == "model: is missing"


def test_other_paths_and_methods_are_refused_with_a_reason(running):
    for method, path, status, reported in (
        ("GET", "/api", 405, "GET is not allowed for this path: use PUT"),
        ("POST", "/api", 405, "POST is not allowed for this path: use PUT"),
        (
            "GET",
            "/x",
            404,
            "there is no such path: use PUT /api, POST /v1/completions, POST /v1",
        ),
    ):
        reply = running.send(method, path)
        assert reply.status == status and reported in reply.json["error"]
    for path in ("/v1/x", "/v1/embeddings", "/v1/completions/"):
        other = running.send("POST", path, {"messages": []})
        assert other.status == 404 and "no such path" in other.json["error"]["message"]
        assert other.json["error"]["code"] is None, "the model is there, and the path is not"
