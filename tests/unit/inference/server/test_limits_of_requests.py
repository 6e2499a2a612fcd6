"""Requests made to keep the server busy: bounded errors and messages, no work on the event loop."""

import threading

import pytest
from servers import serving

from megatron.inference.server.hosts import is_loopback, names_this_machine
from megatron.tokenizer.chat import ChatTemplate

CHAT_PATH = "/v1/chat/completions"
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def running(group):
    with serving(group, chat=TEMPLATE, body_bytes=1 << 20) as running:
        yield running


def _messages(*messages):
    return {"model": "tiny", "messages": [*messages]}


@pytest.mark.parametrize(
    ("path", "body", "reported"),
    [
        (CHAT_PATH, _messages(*[{}] * 200_000), "give at most 2048 messages"),
        (CHAT_PATH, _messages(*[{}] * 2000), "messages.0.role: is missing"),
        (
            CHAT_PATH,
            _messages({"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}),
            "give at most 2048 messages and parts of them, not 20001",
        ),
        (CHAT_PATH, _messages() | {f"f{i}": 1 for i in range(50_000)}, "f1: there is no such"),
        (CHAT_PATH, _messages() | {"metadata": {str(i): 1 for i in range(50_000)}}, "most 16"),
        (CHAT_PATH, _messages() | {"logit_bias": {f"x{i}": 1 for i in range(50_000)}}, "most 1024"),
        (CHAT_PATH, _messages() | {"stop_token_ids": [-1] * 100_000}, "give at most 1024"),
        (CHAT_PATH, _messages() | {"n" * 900_000: 1}, "n…: there is no such field"),
        (
            CHAT_PATH,
            _messages({"role": "user", "content": "a"}) | {"model": "b" * 900_000},
            "no mo",
        ),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": [[], "a"] * 100_000},
            "prompt: give a text",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_list_of_errors_is_bounded(running, path, body, reported):
    reply = running.send("POST", path, body)
    assert reply.status in (400, 404)
    assert reported in reply.json["error"]["message"]
    assert len(reply.body) < 6000


def test_errors_of_prompts_are_bounded(running):
    reply = running.put(prompts=[0] * 300_000)
    assert reply.status == 400 and len(reply.body) < 300
    reply = running.put(prompts=["a"], **{f"f{i}": 1 for i in range(1000)})
    assert reply.json["error"].count("there is no such field") == 20


def test_several_errors_are_reported_together(running):
    reply = running.put(prompts=["a"], top_k=-1, top_p=2, temperature=0)
    assert all(name in reply.json["error"] for name in ("top_k", "top_p", "temperature"))


@pytest.mark.parametrize("path", ["/api", "/v1/completions", CHAT_PATH])
def test_other_requests_are_answered_while_a_text_is_encoded(running, monkeypatch, path):
    begins, ends = threading.Event(), threading.Event()
    tokenizer = type(running.served.tokenizer)
    original = tokenizer.encode

    def encode(self, text):
        begins.set()
        assert ends.wait(60)
        return original(self, text)

    monkeypatch.setattr(tokenizer, "encode", encode)
    if path == CHAT_PATH:
        monkeypatch.setattr(running.served.chat, "_encode", lambda text: encode(tokenizer(), text))
    body = {"prompts": ["a"]} if path == "/api" else {"model": "tiny", "prompt": "a"}
    if path == CHAT_PATH:
        body = _messages({"role": "user", "content": "a"})
    replies = []
    method = "PUT" if path == "/api" else "POST"
    slow = threading.Thread(target=lambda: replies.append(running.send(method, path, body)))
    slow.start()
    try:
        assert begins.wait(60)
        assert running.send("GET", "/health").status == 200
        assert not replies
    finally:
        ends.set()
        slow.join()
    assert replies[0].status == 200


def test_a_local_server_without_a_key_refuses_hosts_of_other_machines(group):
    with serving(group, is_local=True) as running:
        for host in ("evil.example", "127.0.0.1.evil.example", "[2001:db8::1]:80", "["):
            for method, path in (("GET", "/"), ("PUT", "/api"), ("GET", "/v1/models")):
                reply = running.send(method, path, {"prompts": ["a"]}, Host=host)
                assert reply.status == 403 and b"--api-key-file" in reply.body
        for host in ("localhost", "LocalHost:5000", "127.0.0.1:1", "[::1]:5000", "a.localhost"):
            assert running.send("GET", "/health", Host=host).status == 200
    with serving(group, is_local=True, api_key="sesame") as running:
        assert running.send("GET", "/health", Host="proxy.example").status == 200


def test_addresses_of_this_machine():
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("127.8.8.8")
    assert not is_loopback("0.0.0.0") and not is_loopback("no such host")
    assert not names_this_machine("") and not names_this_machine("localhost.example")
