"""A server with many concurrent requests: nothing is lost, mixed up, or left over."""

import json
import logging
import math
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from problems import problem
from servers import EOD, SPEC, Bytes, is_idle, send_on, serving, until
from stages import engine_of, plain_logits, plainly_continued, random_model

from megatron.inference.server.megatron_api import MegatronBody, _tokens
from megatron.inference.server.server import listener


@pytest.fixture(scope="module")
def running(group):
    with serving(group) as running:
        yield running


@pytest.fixture(scope="module")
def model(group):
    return random_model(group, SPEC)


def greedy(model, text, new):
    return plainly_continued(model, SPEC, Bytes().encode(text), new, stops=[EOD])


def test_a_prompt_is_continued_as_by_the_network_alone(running, model):
    texts = ["The cat", "sat", "é"]
    reply = running.put(prompts=texts, tokens_to_generate=6, top_k=1, logprobs=True)
    assert reply.status == 200
    for index, text in enumerate(texts):
        tokens = [*Bytes().encode(text), *greedy(model, text, 6)]
        assert reply.json["text"][index] == Bytes().decode(tokens)
        assert reply.json["segments"][index] == [Bytes().decode([token]) for token in tokens]
        table = plain_logits(model, SPEC, tokens).log_softmax(-1)[:-1]
        reported = table.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        assert reply.json["logprobs"][index] == pytest.approx(reported, abs=1e-4)
    weighed = running.put(prompts=["The cat"], tokens_to_generate=0, logprobs=True).json
    assert weighed["text"] == ["The cat"]
    assert weighed["logprobs"][0] == pytest.approx(reply.json["logprobs"][0][:6], abs=1e-4)


def test_the_same_text_from_the_other_interface(running, model):
    expected = Bytes().decode([t for t in greedy(model, "The cat", 6) if t != EOD])
    request = {"prompt": "The cat", "max_tokens": 6, "temperature": 0}
    (choice,) = running.complete(**request).json["choices"]
    assert (choice["index"], choice["text"], choice["logprobs"]) == (0, expected, None)
    tokens = running.complete(**(request | {"prompt": Bytes().encode("The cat")})).json
    assert tokens["choices"][0]["text"] == expected
    assert tokens["usage"]["prompt_tokens"] == 7
    echoed = running.complete(**request, echo=True, logprobs=2).json["choices"][0]
    assert echoed["text"] == "The cat" + expected
    reported = echoed["logprobs"]
    assert reported["tokens"][:7] == list("The cat") and reported["token_logprobs"][0] is None
    assert len({len(column) for column in reported.values()}) == 1
    for logprob, top in zip(
        reported["token_logprobs"][7:], reported["top_logprobs"][7:], strict=True
    ):
        assert logprob == pytest.approx(max(top.values()))
    assert running.send("GET", "/v1/models").json["data"][0]["id"] == "tiny"
    other = running.send("POST", "/v1/completions", {"model": "gpt", "prompt": "a"})
    assert other.status == 404 and other.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "options", [{"logprobs": 1}, {"n": 3, "seed": 5}, {"stop": ["e", "\ufffd"]}]
)
def test_a_stream_brings_what_one_answer_does(running, options):
    request = {"prompt": ["Once", "upon"], "max_tokens": 12, "seed": 3, "echo": True} | options
    full = running.complete(**request).json
    usage = {"include_usage": True}
    *parts, last = running.complete(**request, stream=True, stream_options=usage).events
    assert last["choices"] == [] and last["usage"] == full["usage"]
    for choice in full["choices"]:
        own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        reasons = [part["finish_reason"] for part in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for column, values in (choice["logprobs"] or {}).items():
            reported = [value for part in own for value in part["logprobs"][column]]
            if column in ("tokens", "text_offset"):
                assert reported == values
            else:
                assert len(reported) == len(values)
    assert len(parts) > len(full["choices"])


def test_a_seed_repeats_draws_and_another_does_not(running):
    def drawn(**options):
        return running.put(prompts=["abc"] * 2, tokens_to_generate=8, **options).json["text"]

    first = drawn(random_seed=7)
    assert first == drawn(random_seed=7) != drawn(random_seed=8)
    assert first[0] != first[1]
    assert drawn() != drawn()
    nearly = drawn(temperature=1e-300)
    assert nearly == drawn(top_k=1) == drawn(top_p=1e-300)


def test_a_text_ends_at_a_line_and_no_line_follows_a_colon(running):
    def put(seed, **options):
        options = {"prompts": ["a"], "tokens_to_generate": 48, "temperature": 9} | options
        return running.put(**options, random_seed=seed).json["text"][0]

    seed = next(seed for seed in range(99) if "\n" in put(seed)[:-1])
    free, cut = put(seed), put(seed, stop_on_eol=True)
    assert cut == free[: free.index("\n") + 1]
    assert put(seed, stop_on_double_eol=True)[: len(cut)] == cut

    colon = {"prompts": ["a:"], "tokens_to_generate": 1, "temperature": 100}
    seed = next(seed for seed in range(2000) if put(seed, **colon) == "a:\n")
    assert put(seed, **colon, prevent_newline_after_colon=True) != "a:\n"


def test_beams_wait_for_the_sequences_before_them(running, model):
    with ThreadPoolExecutor(8) as pool:
        texts = [
            pool.submit(running.put, prompts=["The " + str(i)], tokens_to_generate=20, top_k=1)
            for i in range(4)
        ]
        one = {"tokens_to_generate": 5, "beam_width": 1, "prompts": ["The"]}
        alone = pool.submit(running.put, **one).result().json
        many = pool.submit(running.put, **(one | {"beam_width": 4, "length_penalty": 0})).result()
        assert [reply.result().status for reply in texts] == [200] * 4
    assert alone["text"] == [Bytes().decode([*b"The", *greedy(model, "The", 5)])]
    assert many.json["scores"] == sorted(many.json["scores"], reverse=True)
    assert len(many.json["text"]) == len(many.json["segments"]) == 4
    tokens = [*b"The", *greedy(model, "The", 5)]
    table = plain_logits(model, SPEC, tokens).log_softmax(-1)
    reported = sum(float(table[index, tokens[index + 1]]) for index in range(2, len(tokens) - 1))
    assert alone["scores"] == [pytest.approx(reported / (len(tokens) - 3), abs=1e-4)]
    refused = running.put(**(one | {"beam_width": 9}))
    assert (
        refused.status == 400 and "beam width of 9 must be between 1 and" in refused.json["error"]
    )


def test_two_hundred_at_once_each_get_their_own(running, model):
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 12))) for _ in range(200)]
    numbers = [draw.randint(1, 8) for _ in texts]

    def ask(text, new):
        if new % 2:
            body = {"prompt": text, "max_tokens": new, "temperature": 0, "echo": True}
            return running.complete(**body, stream=True).events
        return running.put(prompts=[text], tokens_to_generate=new, top_k=1).json["text"][0]

    with ThreadPoolExecutor(200) as pool:
        replies = [*pool.map(ask, texts, numbers)]
    expected = {
        (text, new): greedy(model, text, new) for text, new in zip(texts, numbers, strict=True)
    }
    for text, new, reply in zip(texts, numbers, replies, strict=True):
        tokens = expected[text, new]
        if new % 2:
            tokens = [token for token in tokens if token != EOD]
            reply = "".join(part["choices"][0]["text"] for part in reply)
        assert reply == text + Bytes().decode(tokens)
    assert is_idle(running)


def test_who_leaves_is_not_written_for(group):
    with serving(group, rows=2, request_tokens=10**6) as running:
        loop, go_on = running.served.engine_thread, threading.Event()
        step = loop.engine.step
        loop.engine.step = lambda: go_on.wait(60) and (time.sleep(0.02), step())[1]
        for body, path in (
            ({"prompts": ["a"] * 8, "tokens_to_generate": 48, "temperature": 50}, b"PUT /api"),
            (
                {"model": "tiny", "prompt": ["a"] * 8, "max_tokens": 48, "stream": True},
                b"POST /v1/completions",
            ),
        ):
            text = json.dumps(body).encode()
            head = b"%b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path
            go_on.clear()
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
                until(lambda: loop.num_waiting == 6)
            before = loop.num_tokens
            go_on.set()
            until(lambda: is_idle(running))
            assert loop.num_tokens - before < 8 * 48 / 2
            # Half a request, and its end.
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.sendall(head + b"Content-Length: 99\r\n\r\n{")
        assert running.put(prompts=["a"], tokens_to_generate=1).status == 200


def test_a_search_that_its_client_left_is_not_finished(group):
    with serving(group) as running:
        loop, go_on = running.served.engine_thread, threading.Event()
        step = loop.engine.step
        loop.engine.step = lambda: go_on.wait(60) and step()
        text = json.dumps({"prompts": ["a"], "tokens_to_generate": 48, "beam_width": 2}).encode()
        head = b"PUT /api HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
            until(lambda: loop.num_running == 1)
        until(lambda: loop._exclusive.is_cancelled)
        go_on.set()
        until(lambda: is_idle(running))
        assert loop.num_tokens == 0
        assert running.put(prompts=["a"], tokens_to_generate=1).status == 200


def test_a_full_queue_refuses(group):
    with serving(group, rows=1, queue=2) as running:
        engine, go_on = running.served.engine_thread.engine, threading.Event()
        step = engine.step
        engine.step = lambda: go_on.wait(60) and step()
        with ThreadPoolExecutor(3) as pool:
            request = {"prompts": ["a"], "tokens_to_generate": 3}
            first = pool.submit(running.put, **request)
            until(lambda: running.served.engine_thread.num_running == 1)
            others = [pool.submit(running.put, **request) for _ in range(2)]
            until(lambda: running.served.engine_thread.num_waiting == 2)
            for refused in (running.put(**request), running.complete(prompt="a", stream=True)):
                assert refused.status == 503 and refused.headers["retry-after"] == "1"
                assert "2 sequences are waiting" in refused.body.decode()
            assert b"megatron_sequences_waiting 2.0" in running.send("GET", "/metrics").body
            go_on.set()
            assert [one.result().status for one in (first, *others)] == [200] * 3


def test_who_writes_half_a_request_is_not_waited_for(group):
    with serving(group, request_s=1.0) as running:
        head = b"PUT /api HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        full = head + b'Content-Length: 18\r\n\r\n{"prompts": ["a"]}'
        for sent, reported in (
            (b"", b""),
            (head, b""),
            (head + b"Content-Length: 9\r\n\r\n{", b"the body has not arrived within 1 seconds"),
        ):
            with socket.create_connection(("127.0.0.1", running.port), timeout=60) as client:
                client.sendall(sent)
                answer = b"".join(iter(lambda: client.recv(4096), b""))
                assert answer.endswith(reported + b'"}' if reported else b""), answer
                assert answer.startswith(b"HTTP/1.1 408" if reported else b"")
        # Of a connection that has served a request, too.
        with socket.create_connection(("127.0.0.1", running.port), timeout=60) as client:
            client.sendall(full)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            client.sendall(head)
            assert b"HTTP/1.1" not in b"".join(iter(lambda: client.recv(4096), b""))


def test_what_takes_long_to_answer_is_waited_for(group):
    with serving(group, request_s=1.0) as running:
        step = running.served.engine_thread.engine.step
        running.served.engine_thread.engine.step = lambda: (time.sleep(0.2), step())[1]
        reply = running.put(prompts=["a"], tokens_to_generate=8, temperature=50)
        assert reply.status == 200


def test_what_is_under_way_is_finished_before_the_end(group):
    with serving(group, rows=1, grace_s=60) as running:
        loop, go_on = running.served.engine_thread, threading.Event()
        step = loop.engine.step
        loop.engine.step = lambda: go_on.wait(60) and step()
        with ThreadPoolExecutor(2) as pool:
            request = {"prompts": ["a"], "tokens_to_generate": 5}
            first = pool.submit(running.put, **request)
            until(lambda: loop.num_running == 1)
            other = running.connection()
            assert send_on(other, "GET", "/health", None).json == {"status": "ok"}
            running.server.stop()
            # Load balancers open connections of their own.
            health = running.send("GET", "/health")
            assert (health.status, health.json) == (503, {"status": "closing"})
            assert running.put(**request).status == 503
            assert send_on(other, "GET", "/health", None).json == {"status": "closing"}
            late = send_on(other, "PUT", "/api", request)
            assert late.status == 503 and "shutting down" in late.json["error"]
            other.close()
            go_on.set()
            assert first.result().status == 200
        until(lambda: not running.server.started or is_idle(running))
        with pytest.raises(OSError):
            until(lambda: running.send("GET", "/health") and False)


@pytest.mark.parametrize("options", [{"temperature": 50}, {"beam_width": 2}], ids=str)
def test_what_takes_too_long_is_dropped_at_the_end(group, options):
    with serving(group, rows=2, grace_s=0.1) as running:
        loop = running.served.engine_thread
        step = loop.engine.step
        loop.engine.step = lambda: (time.sleep(0.05), step())[1]
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(running.put, prompts=["a"], tokens_to_generate=48, **options)
            until(lambda: loop.num_running == 1)
            running.server.stop()
            assert request.result().status == 503


def test_an_engine_that_fails_is_reported_and_ends_the_server(group):
    with serving(group) as running:

        def fail():
            raise RuntimeError("out of memory")

        running.served.engine_thread.engine.step = fail
        refused = running.put(prompts=["a"])
        assert refused.status == 503 and "the engine has failed" in refused.json["error"]
        until(lambda: running.server.should_exit)
        assert isinstance(running.served.engine_thread.failure, RuntimeError)


@pytest.mark.parametrize("options", [{}, {"beam_width": 2}], ids=str)
def test_a_prompt_without_numbers_is_refused_and_the_next_is_answered(group, options):
    with serving(group, rows=2) as running:
        stage = running.served.engine_thread.engine.runner
        logits = stage.logits
        stage.logits = lambda features: logits(features) * torch.nan
        refused = running.put(prompts=["a"], **options)
        assert refused.status == 503 and "logits are NaN or infinite" in refused.json["error"]
        stage.logits = logits
        assert running.put(prompts=["a"], **options).status == 200


def test_the_server_ends_with_its_launcher(group):
    with serving(group) as running:
        assert not running.server.should_exit
        running.server.launchers = SimpleNamespace(are_gone=lambda: True)
        until(lambda: running.server.should_exit and not running.served.engine_thread.is_open)


def test_only_who_bears_the_key_is_answered(group):
    with serving(group, api_key="sésame") as running:
        for bearer in ("Bearer sesame", "sésame", "Bearer sésam", ""):
            for method, path in (("PUT", "/api"), ("GET", "/v1/models"), ("GET", "/metrics")):
                raw = bearer.encode().decode("latin-1")
                refused = running.send(method, path, {"prompts": ["a"]}, Authorization=raw)
                assert refused.status == 401 and "Bearer" in refused.headers["www-authenticate"]
        right = "Bearer sésame".encode().decode("latin-1")
        for bearer in (right, right.replace("Bearer", "bearer"), right.replace(" ", "  ")):
            request = running.send("PUT", "/api", {"prompts": ["a"]}, Authorization=bearer)
            assert request.status == 200
        head = running.send("HEAD", "/health")
        assert (head.status, head.body) == (200, b"")
        assert running.send("GET", "/health").status == 200
        assert b"<title>" in running.send("GET", "/").body


def test_requests_with_a_common_prefix_reuse_it(running):
    def reused():
        lines = running.send("GET", "/metrics").body.decode().splitlines()
        [line] = [one for one in lines if one.startswith("megatron_reused_prompt_tokens_total")]
        return float(line.split()[1])

    before, common = reused(), "common words first"
    first = running.put(prompts=[f"{common}, a"], tokens_to_generate=2, top_k=1)
    running.put(prompts=[f"{common}, b"], tokens_to_generate=2, top_k=1)
    assert reused() - before == len(f"{common}, ")
    again = running.put(prompts=[f"{common}, a"], tokens_to_generate=2, top_k=1)
    assert again.json == first.json
    assert reused() - before == 2 * len(f"{common}, ")


def test_drafts_are_counted(group):
    engine = engine_of(random_model(group, SPEC), SPEC, tokenizer=Bytes(), draft_tokens=3)
    with serving(group, engine=engine) as running:
        body = {"prompts": ["abcabcabcabc"], "tokens_to_generate": 30, "top_k": 1}
        text = running.put(**body).json["text"]
        metrics = running.send("GET", "/metrics").body.decode()
        counters = engine.counters
        assert counters.draft_tokens
        assert f"megatron_draft_tokens_total {counters.draft_tokens}.0" in metrics
        assert f"megatron_accepted_draft_tokens_total {counters.accepted_tokens}.0" in metrics
    with serving(group) as running:
        assert running.put(**body).json["text"] == text


def test_counts_are_reported(running):
    def reported():
        lines = running.send("GET", "/metrics").body.decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    before = reported()
    running.put(prompts=["abc", "de"], tokens_to_generate=0, logprobs=True)
    running.put(prompts=["abc"], tokens_to_generate=4, top_k=1, random_seed=-1)
    running.put(prompts=["abc"], tokens_to_generate=1)
    running.send("GET", "/nowhere")
    after = reported()

    def more(name):
        return after.get(name, 0) - before.get(name, 0)

    assert more("megatron_generated_tokens_total") == 1
    assert more("megatron_prompt_tokens_total") == 8
    assert more('megatron_requests_total{path="/api",status="200"}') == 2
    assert more('megatron_requests_total{path="/api",status="400"}') == 1
    assert more('megatron_requests_total{path="other",status="404"}') == 1
    assert more('megatron_request_seconds_count{path="/api"}') == 3
    assert all(math.isfinite(value) for value in after.values())


def test_a_line_is_logged_unless_it_is_not_wanted(running):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron.inference.server.app")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        running.put(prompts=["abc"], tokens_to_generate=1)
        running.put(prompts=["abc"], tokens_to_generate=1, no_log=True)
        running.put(prompts=[])
        running.send("GET", "/nowhere")
        until(lambda: any("status: 400" in line for line in lines))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    # The line of a request before these may come late.
    reported = [line.partition(" | time")[0] for line in lines if "/metrics" not in line]
    assert reported == [
        "PUT /api | status: 200",
        "PUT /api | status: 400",
    ]


def test_a_port_that_is_taken_is_reported(running):
    with problem(f"--port {running.port} … another --port"):
        listener("127.0.0.1", running.port)


def test_a_beginning_that_the_tokenizer_has_written_is_not_added_again(running):
    body = MegatronBody(prompts=["a"], add_BOS=True)
    assert _tokens(running.served, body, "a") == [EOD, 97]

    class Beginning(Bytes):
        def encode(self, text):
            return [EOD, *super().encode(text)]

    assert _tokens(replace(running.served, tokenizer=Beginning()), body, "a") == [EOD, 97]
