"""An interface of another file is served by the same engine, errors and metrics."""

from dataclasses import dataclass

import pytest
from fastapi import Request as HTTPRequest
from servers import serving

from megatron.inference.engine.continuous_batching import ExclusiveRequest
from megatron.inference.engine.sequence import Request
from megatron.inference.server.engine_thread import PendingRequests, while_connected
from megatron.inference.server.schemas import Body, Text


class NextBody(Body):
    """The fields of PUT /next."""

    text: Text


@dataclass(frozen=True)
class Next:
    """The most likely next token."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class NextRequest(ExclusiveRequest[Next]):
    """One forward pass without a decode step."""

    prompt: tuple[int, ...]

    def problems(self, engine):
        return engine.problems(Request(prompt=self.prompt, max_new_tokens=1))

    def run(self, runner):
        features = runner.prefill([self.prompt], [len(self.prompt)])[:, -1]
        logits = runner.run_on_last_stage(lambda: runner.logits(features))
        yield
        return [Next((int(logits.argmax()),))]


def add_next_api(app, served):
    @app.put("/next")
    async def next_token(body: NextBody, http: HTTPRequest):
        async def answer():
            request = NextRequest(tuple(served.tokenizer.encode(body.text)))
            with PendingRequests(served.engine_thread, [request]) as pending:
                (found,) = await pending.results()
            return {"token": found.tokens[0]}

        return await while_connected(http, answer)


@pytest.fixture(scope="module")
def running(group):
    with serving(group, interfaces=(add_next_api,)) as running:
        yield running


def test_the_request_runs_in_the_engine_and_is_counted(running):
    first = running.send("PUT", "/next", {"text": "Once"})
    assert first.status == 200 and running.send("PUT", "/next", {"text": "Once"}).json == first.json
    metrics = running.send("GET", "/metrics").body.decode()
    assert 'megatron_requests_total{path="/next",status="200"} 2.0' in metrics
    assert "megatron_generated_tokens_total 2.0" in metrics
    assert "/next" in running.send("GET", "/openapi.json").json["paths"]


def test_its_errors_are_those_of_the_server(running):
    for body, found in (({"text": 1}, "text: "), ({"text": ""}, "a prompt has 0 tokens")):
        reply = running.send("PUT", "/next", body)
        assert reply.status == 400 and found in reply.json["error"]
    reply = running.send("PUT", "/api", {"prompts": ["a"]})
    assert reply.status == 404 and "PUT /next" in reply.json["error"]
    assert running.send("GET", "/").status == running.send("GET", "/health").status == 200
