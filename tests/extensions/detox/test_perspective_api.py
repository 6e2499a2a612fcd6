"""The client of the Perspective API, against a server of its interface on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from problems import problem

from megatron.extensions.detox.toxicity.perspective import (
    ATTRIBUTES,
    PerspectiveAPI,
    ScorerUnavailableError,
)

KEY = "a-secret-key"
SCORED = {
    "attributeScores": {
        name.upper(): {"summaryScore": {"value": 0.1 * (i + 1)}}
        for i, name in enumerate(ATTRIBUTES)
    }
}
SCORES = {name: 0.1 * (i + 1) for i, name in enumerate(ATTRIBUTES)}


def error(code, **detail):
    return code, {}, json.dumps({"error": {"message": f"key {KEY}", "details": [detail]}})


OK = (200, {}, json.dumps(SCORED))


class Server(ThreadingHTTPServer):
    """Gives its answers one after the other, the last for ever, and keeps the requests."""

    def __init__(self):
        self.answers, self.requests = [OK], []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1alpha1/comments:analyze"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        answers = self.server.answers
        code, headers, text = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        """Keep stderr for the tests."""


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def waits():
    return []


@pytest.fixture
def api(server, waits):
    return PerspectiveAPI(KEY, server.url, max_retries=3, sleep=waits.append)


def test_a_request_and_its_scores(api, server, waits):
    assert api(["a", "ü"]) == [pytest.approx(SCORES)] * 2
    path, headers, body = server.requests[1]
    assert KEY not in path
    assert headers["X-Goog-Api-Key"] == KEY
    assert body == {
        "comment": {"text": "ü"},
        "requestedAttributes": {name.upper(): {} for name in ATTRIBUTES},
        "spanAnnotations": False,
        "languages": ["en"],
    }
    assert waits == []


def test_a_failed_request_is_repeated(api, server, waits):
    server.answers = [(429, {"Retry-After": "7"}, ""), error(503), (200, {}, "not JSON"), OK]
    assert api(["a"]) == [pytest.approx(SCORES)]
    assert waits == [7, 2, 4]
    server.answers = [(429, {"Retry-After": "100000"}, ""), (200, {}, "{}"), OK]
    assert api(["a"]) == [pytest.approx(SCORES)]
    assert waits[3:] == [60, 2]


def test_retries_end(api, server, waits):
    server.answers = [error(500)]
    with problem("4 times … status 500 … --scorer transformers", ScorerUnavailableError) as caught:
        api(["a"])
    assert len(server.requests) == 4
    assert waits == [1, 2, 4]
    assert KEY not in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_server_that_is_gone_is_reported(server, waits):
    api = PerspectiveAPI(KEY, server.url, max_retries=1, sleep=waits.append)
    server.server_close()
    with problem("2 times … refused", ScorerUnavailableError):
        api(["a"])


def test_a_text_that_is_refused_has_no_score(api, server):
    server.answers = [error(400, errorType="LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE"), OK]
    assert api(["a", "b"]) == [None, pytest.approx(SCORES)]


@pytest.mark.parametrize(
    "answer",
    [error(400, reason="API_KEY_INVALID"), error(403), (404, {}, "gone"), (400, {}, "[]")],
)
def test_a_wrong_key_or_address_is_not_repeated(api, server, answer):
    server.answers = [answer]
    with problem("status 40 … 31 December 2026") as caught:
        api(["a"])
    assert len(server.requests) == 1
    assert KEY not in str(caught.value)
