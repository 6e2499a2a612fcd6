"""Engines on one device, and the losses of a CPU to compare them with.

    python tests/gpu/trainings.py FLAGS...

trains on a CPU and prints the losses as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 500
NETWORK = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--seq-length", "256", "--micro-batch-size", "4"),
)
TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--micro-batch-size", "2"),
)
"""The network of a rehearsal."""


def network_of(device: torch.device) -> tuple[str, ...]:
    """Return flags of the network that is trained on `device`."""
    return NETWORK if device.type == "cuda" else TINY


class Training:
    """An engine on `device` and its micro-batches: the same random tokens each time."""

    def __init__(self, device: torch.device, *flags: str, network: Sequence[str] = ()):
        from megatron.config.config import parse_config
        from megatron.config.plan.plan import plan
        from megatron.objectives.gpt import GPT
        from megatron.training import setup

        common = (
            "--lr 1e-3 --train-iters 100 --clip-grad 1.0 --data-path none --seed 7 "
            f"--attention-dropout 0 --hidden-dropout 0 --device {device.type}"
        )
        config, _ = parse_config([*common.split(), *(network or network_of(device)), *flags])
        self.plan = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device=device.type)
        kernels, self.choices = setup.choose(self.plan, device)
        self._groups = setup.build_process_groups(self.plan)
        self.engine = setup.build_engine(self.plan, self._groups, GPT(), kernels)
        self.engine.set_lr(1e-3)
        self.batches = self._batches(device)

    def _batches(self, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        from megatron.objectives.gpt import gpt_batch

        generator = torch.Generator().manual_seed(0)
        shape = (self.plan.batch.micro_batch_size, self.plan.model.seq_length + 1)
        while True:
            batch = gpt_batch(torch.randint(VOCAB_SIZE, shape, generator=generator))
            yield {name: tensor.to(device) for name, tensor in batch.items()}

    def batches_of_files(self, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        """Return the micro-batches of --data-path, read as a run reads them."""
        from megatron.objectives.gpt import GPT
        from megatron.training import setup

        train = setup.read_datasets(self.plan).train
        run = {"plan": self.plan, "objective": GPT(), "groups": self._groups, "device": device}
        return setup.batches_of(train, 0, eod=None, **run)

    def losses(
        self, steps: int, *, before: Callable[[int], None] = lambda step: None
    ) -> list[float]:
        """Return the losses of so many steps.

        Args:
            before: called before each step with its index.
        """
        found = []
        for step in range(steps):
            before(step)
            found.append(float(self.engine.train_batch(self.batches)))
        return found


def cpu_losses(device: torch.device, steps: int, *flags: str) -> list[float]:
    """Return the losses of the network of `device` on a CPU, in a process of its own for a GPU."""
    if device.type == "cpu":
        return Training(device, *flags).losses(steps)
    words = (str(steps), *NETWORK, *flags)
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "MASTER_PORT": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the losses of a CPU."""
    from megatron.engine.deepspeed import distributed
    from megatron.training.process.environment import Launch, export_launch

    export_launch(Launch(0, 1, 0, 1), "cpu")
    distributed.start("gloo")
    steps, *flags = sys.argv[1:]
    training = Training(torch.device("cpu"), network=flags)
    print(json.dumps(training.losses(int(steps))))


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main()
