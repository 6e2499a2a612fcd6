"""A text generation server in this process, of an untrained network."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from stages import engine_of, random_model
from tiny import tiny_spec

from megatron.config.inference.server import Limits
from megatron.config.network.model_spec import ModelSpec
from megatron.data.datasets.fim import FimTokens
from megatron.inference.server.app import INTERFACES, Interface, build_app
from megatron.inference.server.engine_thread import EngineThread, ServingEngine
from megatron.inference.server.served_model import ServedModel
from megatron.inference.server.server import Server
from megatron.inference.server.web.pages import GENERATION_PAGE
from megatron.tokenizer.chat import ChatTemplate
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.tokenizer import Tokenizer, Vocabulary

EOD = 256
SPEC = tiny_spec(
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=4,
    head_dim=4,
    seq_length=64,
    max_position_embeddings=64,
    vocab_size=EOD + 1,
    padded_vocab_size=260,
)
LIMITS = Limits(
    new_tokens=48,
    prompts=8,
    request_tokens=400,
    body_bytes=20_000,
    queue=1000,
    grace_s=20.0,
    request_s=60.0,
)


class Bytes(Tokenizer):
    """A token for each byte, and one for the end of a document."""

    name = "bytes"
    vocab_size = EOD + 1
    special_ids = {"eod": EOD}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        raw = (b"<eod>" if i == EOD else bytes([i]) for i in ids)
        return b"".join(raw).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        return Vocabulary((), "bytes")


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What the server sent bit by bit, without the last word."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@dataclass(frozen=True)
class Running:
    """A server that answers at `port`."""

    served: ServedModel
    server: Server
    port: int

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Return the reply to `body`: bytes as they are, anything else as JSON."""
        connection = self.connection()
        try:
            return send_on(connection, method, path, body, **headers)
        finally:
            connection.close()

    def put(self, **body: Any) -> Reply:
        return self.send("PUT", "/api", body)

    def complete(self, **body: Any) -> Reply:
        return self.send("POST", "/v1/completions", {"model": "tiny", **body})

    def chat(self, **body: Any) -> Reply:
        return self.send("POST", "/v1/chat/completions", {"model": "tiny", **body})


def send_on(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, **headers: str
) -> Reply:
    """Return the reply on a connection that stays open."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread will bring about."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it has not come about")


def is_idle(running: Running) -> bool:
    loop = running.served.engine_thread
    return not (loop.num_running or loop.num_waiting)


@contextmanager
def serving(
    group: object,
    *,
    rows: int = 8,
    api_key: str | None = None,
    is_local: bool = False,
    spec: ModelSpec = SPEC,
    tokenizer: Tokenizer | None = None,
    chat: ChatTemplate | None = None,
    fim: FimTokens | None = None,
    interfaces: Sequence[Interface] | None = None,
    page: str = GENERATION_PAGE,
    engine: ServingEngine | None = None,
    **limits: float,
) -> Iterator[Running]:
    """Serve until the context is left."""
    tokenizer = tokenizer or Bytes()
    engine = engine or engine_of(random_model(group, spec), spec, rows=rows, tokenizer=tokenizer)
    resolved = replace(LIMITS, **limits)
    engine_thread = EngineThread(engine, queue=resolved.queue)
    served = ServedModel(
        engine_thread=engine_thread,
        tokenizer=tokenizer,
        vocab_size=engine.runner.spec.vocabulary.vocab_size,
        limits=resolved,
        name="tiny",
        seed=1234,
        chat=ChatPrompts(tokenizer, chat) if chat else None,
        fim=fim,
    )
    app = build_app(
        served,
        api_key=api_key,
        is_local=is_local,
        interfaces=interfaces or INTERFACES,
        page=page,
    )
    server = Server(
        app,
        engine_thread,
        host="127.0.0.1",
        port=0,
        grace_s=resolved.grace_s,
        headers_s=resolved.request_s,
    )
    engine_thread.start()
    thread = threading.Thread(target=lambda: server.run(sockets=[server.listener]))
    thread.start()
    try:
        yield Running(served, server, server.listener.getsockname()[1])
    finally:
        server.stop()
        thread.join()
        engine_thread.close()
