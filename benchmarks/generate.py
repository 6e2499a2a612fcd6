#!/usr/bin/env python
"""Speed of generation on CPUs, beside Hugging Face's `generate` with the same weights.

Both sides and all batch sizes take turns in one process, so that whatever else the machine does
falls on all of them. Random weights, greedy, every sequence of the same length.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, wrap_full_tensor
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.model_plan import plan_model
from megatron.config.network.model_spec import ModelSpec
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.model_runner import ModelRunner
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.loading.loaded_model import lone_groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(argv: Sequence[str]) -> None:
    """Measure every dtype and batch size, and print one line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens added to each")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    for dtype in args.dtypes:
        theirs = hugging_face(
            args.layers, args.hidden, args.heads, args.vocab, args.prompt + args.new
        )
        theirs = theirs.to(DTYPES[dtype])
        ours = engine(theirs, DTYPES[dtype], rows=max(args.batches))
        cpu: dict[tuple[int, str], list[float]] = {}
        for turn in range(args.rounds + 1):
            for batch in args.batches:
                prompts = torch.randint(args.vocab, (batch, args.prompt)).tolist()
                for side, call in (
                    ("megatron", partial(continue_here, ours, prompts, args.new)),
                    ("Hugging Face", partial(continue_there, theirs, prompts, args.new)),
                ):
                    cpu_s = timed(call)
                    if turn:  # the first turn warms up
                        speed = batch * args.new / cpu_s
                        cpu.setdefault((batch, side), []).append(speed)
        for line in lines(dtype, args.batches, cpu):
            print(line, flush=True)


def hugging_face(layers: int, hidden: int, heads: int, vocab: int, length: int) -> GPT2LMHeadModel:
    """Return GPT-2 of these sizes with random weights."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def engine(model: GPT2LMHeadModel, dtype: torch.dtype, *, rows: int) -> InferenceEngine:
    """Return this program's engine with the weights of `model`."""
    spec = spec_of(model.config)
    theirs = model.state_dict()
    weights = {
        part.ours: ParameterState(
            weight=wrap_full_tensor(
                part.mapping.from_hugging_face([theirs[name] for name in part.theirs])
            )
        )
        for part in family_of(spec).parts(spec)
    }
    stage = ModelRunner(
        spec, weights, groups=lone_groups(), dtype=dtype, device=torch.device("cpu"), rows=rows
    )
    return InferenceEngine(stage, rows=rows)


def spec_of(config: GPT2Config) -> ModelSpec:
    """Return the network of GPT-2's sizes."""
    flags = (
        f"--num-layers {config.n_layer} --hidden-size {config.n_embd} --lr 0 "
        f"--num-attention-heads {config.n_head} --seq-length {config.n_positions} "
        f"--max-position-embeddings {config.n_positions} --make-vocab-size-divisible-by 1 --micro-batch-size 1"
    )
    parsed, _ = parse_config(flags.split())
    return plan_model(parsed, vocab_size=config.vocab_size, tensor=1)


def continue_here(
    ours: InferenceEngine, prompts: Sequence[Sequence[int]], new: int
) -> list[list[int]]:
    """Return the new tokens of each prompt."""
    requests = [
        Request(prompt=tuple(prompt), max_new_tokens=new, sampling=SamplingParams(greedy=True))
        for prompt in prompts
    ]
    return [list(completion.tokens) for completion in ours.generate(requests)]


def continue_there(
    theirs: GPT2LMHeadModel, prompts: Sequence[Sequence[int]], new: int
) -> list[list[int]]:
    """Return the same by Hugging Face's `generate`."""
    tokens = torch.tensor(prompts)
    found = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return found[:, tokens.size(1) :].tolist()


def timed(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    started_at = time.process_time()
    call()
    return time.process_time() - started_at


def lines(
    dtype: str, batches: Sequence[int], cpu: dict[tuple[int, str], list[float]]
) -> Iterator[str]:
    """Yield medians and their ratios."""
    ours = {batch: statistics.median(cpu[batch, "megatron"]) for batch in batches}
    for batch in batches:
        theirs = statistics.median(cpu[batch, "Hugging Face"])
        yield (
            f"{dtype} | sequences at once: {batch} | tokens per CPU second: megatron "
            f"{ours[batch]:.1f}, Hugging Face {theirs:.1f} | ratio {ours[batch] / theirs:.2f} | "
            f"times that of {batches[0]}: {ours[batch] / ours[batches[0]]:.2f}"
        )


if __name__ == "__main__":
    run_tool(main)
