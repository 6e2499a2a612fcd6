#!/usr/bin/env python
"""Throughput of the text generation server: concurrent clients, beside one alone.

Random weights in this process, real HTTP on the loopback; each client sends one prompt after the
other. All numbers of clients take turns, so that whatever else the machine does falls on all.
"""

import http.client
import json
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch

from megatron.checkpointing.resharding.sharded_tensor import ParameterState, wrap_full_tensor
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.inference.server import Limits
from megatron.config.model_plan import plan_model
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.runner.model_runner import ModelRunner
from megatron.inference.server.app import build_app
from megatron.inference.server.engine_thread import EngineThread
from megatron.inference.server.served_model import ServedModel
from megatron.inference.server.server import Server
from megatron.model.gpt import gpt_layers
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.process_groups import lone_group
from megatron.tokenizer.types.null import NullTokenizer


def main(argv: Sequence[str]) -> None:
    """Measure every number of clients, and print one line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each number")
    parser.add_argument("--requests", type=int, default=2, help="of each client in a turn")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens added to each")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50303)
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    wall: dict[int, list[float]] = {number: [] for number in args.clients}
    cpu: dict[int, list[float]] = {number: [] for number in args.clients}
    with serving(args, rows=max(args.clients)) as port:
        for turn in range(args.rounds + 1):
            for number in args.clients:
                at, cpu_at = time.perf_counter(), time.process_time()
                send_all(args, port, number)
                tokens = number * args.requests * args.new
                if turn:  # the first turn warms up
                    wall[number].append(tokens / (time.perf_counter() - at))
                    cpu[number].append(tokens / (time.process_time() - cpu_at))
    first = args.clients[0]
    for number in args.clients:
        speed, of_cpu = statistics.median(wall[number]), statistics.median(cpu[number])
        print(
            f"clients: {number} | tokens/s: {speed:.1f} | per CPU second: {of_cpu:.1f} | times "
            f"that of {first}: {speed / statistics.median(wall[first]):.2f} | of CPU: "
            f"{of_cpu / statistics.median(cpu[first]):.2f}",
            flush=True,
        )


@contextmanager
def serving(args: Namespace, *, rows: int) -> Iterator[int]:
    """Serve a network of random weights; the port is yielded."""
    engine_thread = EngineThread(engine(args, rows=rows), queue=1000)
    limits = Limits(
        new_tokens=args.new,
        prompts=1,
        request_tokens=10**6,
        body_bytes=1 << 20,
        queue=1000,
        grace_s=0.0,
        request_s=60.0,
    )
    served = ServedModel(
        engine_thread=engine_thread,
        tokenizer=NullTokenizer(args.vocab),
        vocab_size=args.vocab + 1,
        limits=limits,
        name="random",
        seed=1,
    )
    server = Server(
        build_app(served, api_key=None),
        engine_thread,
        host="127.0.0.1",
        port=0,
        grace_s=limits.grace_s,
        headers_s=limits.request_s,
    )
    engine_thread.start()
    thread = threading.Thread(target=lambda: server.run(sockets=[server.listener]))
    thread.start()
    try:
        yield server.listener.getsockname()[1]
    finally:
        server.stop()
        thread.join()
        engine_thread.close()


def engine(args: Namespace, *, rows: int) -> InferenceEngine:
    """Return the engine of a network of random weights."""
    length = args.prompt + args.new
    flags = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --lr 0 --num-attention-heads "
        f"{args.heads} --seq-length {length} --max-position-embeddings {length} "
        "--micro-batch-size 1 --make-vocab-size-divisible-by 16"
    )
    parsed, _ = parse_config(flags.split())
    spec = plan_model(parsed, vocab_size=args.vocab + 1, tensor=1)
    parts = LayerParts(group=lone_group(), core_attention=core_attention_of(spec))
    model = SequentialModel(gpt_layers(spec, parts))
    initialise(model, seed=1, std=0.02, num_layers=spec.num_layers)
    weights = {
        name: ParameterState(weight=wrap_full_tensor(tensor))
        for name, tensor in model.state_dict().items()
    }
    cpu = torch.device("cpu")
    stage = ModelRunner(
        spec, weights, groups=lone_groups(), dtype=torch.float32, device=cpu, rows=rows
    )
    return InferenceEngine(stage, rows=rows)


def send_all(args: Namespace, port: int, clients: int) -> None:
    """Let this many concurrent clients send requests, each one prompt after the other."""

    def send(client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for number in range(args.requests):
            words = (str((7 * client + 3 * number + i) % args.vocab) for i in range(args.prompt))
            # With this temperature the end of a document is hardly ever drawn.
            body = {"prompts": [" ".join(words)], "tokens_to_generate": args.new, "no_log": True}
            headers = {"Content-Type": "application/json"}
            connection.request("PUT", "/api", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            body_read = response.read()
            assert response.status == 200, body_read
        connection.close()

    with ThreadPoolExecutor(clients) as pool:
        for _ in pool.map(send, range(clients)):
            pass


if __name__ == "__main__":
    run_tool(main)
