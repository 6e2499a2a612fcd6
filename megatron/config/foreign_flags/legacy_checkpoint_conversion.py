"""What tools that convert checkpoints take from a command line that is not theirs."""

from collections.abc import Mapping
from typing import Any

from megatron.config.parsing.flags import Legacy

ANY_RUN: Mapping[str, Mapping[str, Any]] = {
    "model": {"num_layers": 0, "hidden_size": 0, "num_attention_heads": 0, "seq_length": 0},
    "schedule": {"lr": 0.0},
    "training": {"micro_batch_size": 1, "train_iters": 1},
    "data": {"data_path": ["unknown"]},
}
"""Wishes of a run of which nothing is known; the files say the network."""

CONVERSION_LEGACY = (
    Legacy("--max-queue-size", "tensors are read and written one by one: there is no queue", 1),
    Legacy("--megatron-path", "no code of Megatron-LM's is needed to read its files", 1),
    Legacy("--no-checking", "every parameter and its shape are checked"),
    Legacy("--model-size", "the files say the size", 1),
    Legacy("--checkpoint-type", "the files say whose they are, or --loader does", 1),
)
"""Flags of Megatron-LM's conversion tool that have nothing to say here."""
