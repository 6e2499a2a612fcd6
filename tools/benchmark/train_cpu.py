"""Training speed of one process on CPUs, beside a plain PyTorch loop of the same model.

Both take turns in one process, so that whatever else the machine does falls on both. Compare the
ratios by CPU time: wall time depends on the neighbours.
"""

import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import log
from megatron.config.config import parse_config
from megatron.engine import distributed
from megatron.engine.engine import MicroBatch
from megatron.plan.model_spec import ModelSpec
from megatron.plan.plan import Plan, plan
from megatron.tool import run_tool
from megatron.training.batch import gpt_micro_batch
from megatron.training.device import prepare_process
from megatron.training.objective import GPT
from megatron.training.setup import build_gpt_engine, build_process_groups, choose

VOCAB_SIZE = 8192


class PlainBlock(nn.Module):
    """Attention and MLP behind norms, batch first."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        width = spec.hidden_size
        self.heads = spec.num_attention_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Return [b, s, h]."""
        b, s, h = x_bsh.shape
        qkv = self.qkv(self.norm_1(x_bsh)).split(h, dim=2)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bsh = x_bsh + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        inner = F.gelu(self.up(self.norm_2(x_bsh)), approximate="tanh")
        return x_bsh + self.down(inner)


class PlainGPT(nn.Module):
    """Learned positions, tied head."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.tokens = nn.Embedding(spec.padded_vocab_size, spec.hidden_size)
        self.positions = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(spec) for _ in range(spec.num_layers))
        self.norm = nn.LayerNorm(spec.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=spec.init_std)

    def forward(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        """Return the mean loss."""
        x = self.tokens(tokens_bs) + self.positions.weight[: tokens_bs.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels_bs.flatten())


class PlainLoop:
    """AdamW in one fused pass, clipping at 1, autocast when `dtype` is bf16."""

    def __init__(self, spec: ModelSpec, dtype: str, lr: float):
        self.model = PlainGPT(spec)
        self.bf16 = dtype == "bf16"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)

    def step(self, tokens_bs: Tensor, labels_bs: Tensor) -> float:
        """Take one optimizer step; return its loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.model(tokens_bs, labels_bs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def main(argv: Sequence[str]) -> None:
    """Measure every precision asked for and print one line each."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument(
        "--attention-impl",
        choices=("sdpa", "fused-softmax", "reference"),
        default="sdpa",
        help="attention of our side; the plain loop has sdpa",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    said = parser.parse_args(argv)
    log.configure(rank=0)
    for dtype in said.dtypes:
        sides = build_sides(dtype, said.batch, said.attention_impl)
        torch.set_num_threads(said.threads)
        tokens_per_turn = said.steps * said.batch * 256
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        wall: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(said.rounds + 1):
            for name, step in sides.items():
                cpu_s, wall_s = timed(step, said.steps)
                if turn:  # the first turn warms up
                    cpu[name].append(tokens_per_turn / cpu_s)
                    wall[name].append(tokens_per_turn / wall_s)
        print(line(dtype, "CPU", cpu), line(dtype, "wall", wall), sep="\n", flush=True)


def build_sides(dtype: str, batch: int, attention: str) -> dict[str, Callable[[], object]]:
    """Return, by name, what takes one step."""
    flags = (
        "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 256 "
        f"--micro-batch-size {batch} --lr 1e-4 --train-iters 1000 --clip-grad 1.0 --device cpu "
        f"--attention-dropout 0 --hidden-dropout 0 --data-path none --attention-impl {attention}"
    ).split()
    config, _ = parse_config([*flags, "--bf16"] if dtype == "bf16" else flags)
    launch, device = prepare_process(config.parallel)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device=device.type)
    if not torch.distributed.is_initialized():
        distributed.start("gloo")
    kernels, _ = choose(decided, device)
    engine = build_gpt_engine(decided, build_process_groups(decided), GPT, kernels)
    engine.set_lr(1e-4)
    batches = random_batches(decided, batch)
    loop = PlainLoop(decided.model, dtype, lr=1e-4)

    def plain_step() -> float:
        (tokens, _), (labels, _) = next(batches)
        return loop.step(tokens, labels)

    return {"megatron": lambda: float(engine.train_batch(batches)), "plain": plain_step}


def random_batches(decided: Plan, batch: int) -> Iterator[MicroBatch]:
    """Yield micro-batches of random tokens without end."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch, decided.model.seq_length + 1)
    while True:
        yield gpt_micro_batch(torch.randint(VOCAB_SIZE, shape, generator=generator))


def timed(step: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the CPU and wall seconds of so many steps."""
    cpu_at, wall_at = time.process_time(), time.perf_counter()
    for _ in range(times):
        step()
    return time.process_time() - cpu_at, time.perf_counter() - wall_at


def line(dtype: str, clock: str, tokens_per_s: dict[str, list[float]]) -> str:
    """Return medians and their ratio."""
    ours, plain = (statistics.median(tokens_per_s[name]) for name in ("megatron", "plain"))
    return (
        f"{dtype} | tokens per {clock} second: megatron {ours:.0f}, plain PyTorch {plain:.0f} | "
        f"ratio {ours / plain:.3f}"
    )


if __name__ == "__main__":
    run_tool(main)
