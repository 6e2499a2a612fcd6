#!/usr/bin/env python
"""Steps with overlapped communication against the same steps without, over a slow simulated network.

Takes the flags of pretrain_gpt.py and --megabytes-per-second of the network. Start it with a launcher
on several processes. Collectives run over gloo as usual; waiting for one takes at least as long as the
network would need for its bytes, which passes in the meantime if something is computed.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch
from communication import hidden_share, record_communication
from timed_steps import random_batches, timed

from megatron.common import logging as log
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.engine.deepspeed import distributed
from megatron.objectives.gpt import GPT
from megatron.training.process.device import prepare_process
from megatron.training.setup import build_engine, build_process_groups, choose

VOCAB_SIZE = 1024
ROUNDS, STEPS = 4, 4


def main(argv: Sequence[str]) -> None:
    """Print seconds of a step of both kinds in turn, their ratio, and the share of hidden bytes."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--megabytes-per-second", type=float, default=50.0)
    own, flags = parser.parse_known_args(argv)
    file = Path(tempfile.mkdtemp()) / "after.json"
    file.write_text(json.dumps({"bf16": {"enabled": True, "immediate_grad_update": False}}))
    steps = {
        "overlapped": _stepper(flags),
        "after backward": _stepper([*flags, "--deepspeed_config", str(file)]),
    }
    log.configure(rank=torch.distributed.get_rank())
    per_byte = 1e-6 / own.megabytes_per_second
    spent = dict.fromkeys(steps, 0.0)
    shares = {}
    for step in steps.values():
        step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            with record_communication(per_byte) as record:
                spent[name] += timed(step, STEPS)[1]
            shares[name] = hidden_share(record.collectives)
    if torch.distributed.get_rank() == 0:
        for name, seconds in spent.items():
            step_s = seconds / ROUNDS / STEPS
            print(f"{name}: {step_s:.3f} s a step, {shares[name]:.0%} of the bytes hidden")
        print(f"ratio: {spent['after backward'] / spent['overlapped']:.2f}")


def _stepper(flags: Sequence[str]) -> Callable[[], object]:
    """Return a function that takes one step of a run with these flags."""
    config, _ = parse_config([*flags, "--data-path", "none", "--device", "cpu"])
    launch, device = prepare_process(config.parallel)
    decided = plan(config, world_size=launch.world_size, vocab_size=VOCAB_SIZE, device=device.type)
    if not torch.distributed.is_initialized():
        distributed.start("gloo")
    kernels, _ = choose(decided, device)
    engine = build_engine(decided, build_process_groups(decided), GPT(), kernels)
    batches = random_batches(decided, decided.batch.micro_batch_size)
    return lambda: engine.train_batch(batches)


if __name__ == "__main__":
    run_tool(main)
