#!/usr/bin/env python
"""Cached tokens: time to the first token, choices of a question, and text that repeats itself with drafts.

One network of random weights, greedy, one sequence at a time; engines with and without take turns in one
process. Seconds are those of the CPU. The last line is the result as JSON.
"""

import json
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch

from megatron.checkpointing.resharding.sharded_tensor import ParameterState, wrap_full_tensor
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.model_plan import plan_model
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.evaluation.scoring import Window, score_windows
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.runner.model_runner import ModelRunner
from megatron.model.gpt import gpt_layers
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts


def main(argv: Sequence[str]) -> None:
    """Measure both, and print a line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--prefix", type=int, default=500, help="tokens that all prompts share")
    parser.add_argument("--prompt", type=int, default=564, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of a continuation")
    parser.add_argument("--drafts", type=int, default=5, help="tokens of a draft")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50303)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    runner = runner_of(args, rows=4)
    sides = {
        "plain": InferenceEngine(runner, rows=4, prefix_caching=False),
        "prefix cached": InferenceEngine(runner, rows=4),
    }
    draw = random.Random(1)
    shared = tuple(draw.randrange(args.vocab) for _ in range(args.prefix))
    found: dict[str, list[float]] = {}
    for turn in range(args.rounds + 1):
        rest = tuple(draw.randrange(args.vocab) for _ in range(args.prompt - args.prefix))
        for name, engine in sides.items():
            took_s, _ = timed(engine, request_of((*shared, *rest), 1))
            if turn:  # the first turn warms up, and caches the prefix
                found.setdefault(f"{name}, ms to the first token", []).append(1e3 * took_s)
    for turn in range(args.rounds):
        for name, contexts in (("4 contexts", 4), ("1 context", 1)):
            firsts = [draw.randrange(args.vocab) for _ in range(contexts)] * (4 // contexts)
            windows = [Window((first, *shared, 1, 2, turn, i), 4) for i, first in enumerate(firsts)]
            start = time.process_time()
            score_windows(runner, windows, [range(4)])
            key = f"4 choices of {name}, ms"
            found.setdefault(key, []).append(1e3 * (time.process_time() - start))
    for name, count in (("plain", 0), (f"{args.drafts} drafts", args.drafts)):
        engine = InferenceEngine(runner, rows=4, prefix_caching=False, draft_tokens=count)
        for label, sampling in (
            ("repetitive", SamplingParams(greedy=True)),
            ("random", SamplingParams()),
        ):
            for turn in range(args.rounds):
                prompt = tuple(random.Random(turn).randrange(args.vocab) for _ in range(16))
                took_s, _ = timed(engine, request_of(prompt, args.new, sampling))
                key = f"{name}, {label}, tokens/s"
                found.setdefault(key, []).append(args.new / took_s)
            counters = engine.counters
            print(name, label, vars(counters), flush=True)
    result = {name: round(statistics.median(values), 1) for name, values in found.items()}
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps(result))


def runner_of(args: Namespace, *, rows: int) -> ModelRunner:
    """Return the runner of a GPT with random weights."""
    length = args.prompt + args.new
    flags = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --lr 0 --num-attention-heads "
        f"{args.heads} --seq-length {length} --max-position-embeddings {length} --micro-batch-size 1"
    )
    parsed, _ = parse_config(flags.split())
    spec, groups = plan_model(parsed, vocab_size=args.vocab, tensor=1), lone_groups()
    parts = LayerParts(group=groups.tensor, core_attention=core_attention_of(spec))
    model = SequentialModel(gpt_layers(spec, parts))
    initialise(model, seed=1, std=0.02, num_layers=spec.num_layers)
    weights = {
        name: ParameterState(weight=wrap_full_tensor(tensor))
        for name, tensor in model.state_dict().items()
    }
    cpu = torch.device("cpu")
    return ModelRunner(spec, weights, groups=groups, dtype=torch.float32, device=cpu, rows=rows)


def request_of(
    prompt: tuple[int, ...], new: int, sampling: SamplingParams | None = None
) -> Request:
    """Return a request of this many new tokens."""
    return Request(
        prompt=prompt, max_new_tokens=new, sampling=sampling or SamplingParams(greedy=True)
    )


def timed(engine: InferenceEngine, request: Request) -> tuple[float, tuple[int, ...]]:
    """Return the CPU seconds of a request, and its tokens."""
    start = time.process_time()
    [done] = engine.generate([request])
    return time.process_time() - start, done.tokens


if __name__ == "__main__":
    run_tool(main)
