"""A job that takes a third of a second, and what its calm run came to."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import Ended, hashes, run_job, steps

from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

LAST = 6
FLAGS = f"""
    --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --device cpu
    --micro-batch-size 1 --global-batch-size 2 --lr 0.01 --train-iters {LAST} --eval-iters 0
    --tokenizer-type NullTokenizer --vocab-size 60 --pad-vocab-size-to 128
    --log-interval 1 --save-interval 2
"""


@dataclass(frozen=True)
class Job:
    """A command line but for its --save, and what its calm run came to."""

    flags: list[str]
    ranks: int
    save: Path
    events: list[list[str]]

    def run(self, save: Path, *more: str, **words: Any) -> Ended:
        """Start the same command, or go on with it, in `save`."""
        argv = [*self.flags, "--save", str(save), "--load", str(save), *more]
        return run_job(argv, save, ranks=self.ranks, **words)


def is_same(save: Path, calm: Path) -> bool:
    """Whether two runs took the same steps and came to the same state, bit for bit."""
    return steps(save) == steps(calm) and hashes(save, LAST) == hashes(calm, LAST)


def calm_job(folder: Path, *flags: str, ranks: int = 1) -> Job:
    """Return a job that has run once, in `folder`, with dropout: streams that are lost are seen."""
    prefix = folder / "corpus"
    draw = random.Random(0)
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for _ in range(100):
            writer.append([*draw.choices(range(60), k=draw.randint(3, 30)), 60])
    data = ["--data-path", str(prefix), "--data-cache-path", str(folder / "cache")]
    job = Job([*FLAGS.split(), *data, *flags], ranks, folder / "calm", [])
    job.events[:] = job.run(job.save).succeeded().events
    return job
