"""Networks with random weights for inference, and a tokenizer for them."""

from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.conversion.network import parameters_of
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, wrap_full_tensor
from megatron.common.atomic_files import replace_text
from megatron.config.network.model_spec import ModelSpec
from megatron.inference.loading.loaded_model import lone_groups
from megatron.tensor_parallel.process_groups import Groups
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "##d", "[BOS]", "[EOS]"]
A, B, C, D, BOS, EOS, SENTINEL = range(5, 12)


def tokenizer_in(folder: Path, *, extra_ids: int = 0) -> WordPieceTokenizer:
    """Return a WordPiece tokenizer whose vocabulary is written to `folder`."""
    # All ranks of a test write it.
    replace_text(folder / "vocab.txt", "\n".join(TOKENS))
    return WordPieceTokenizer(folder / "vocab.txt", lower_case=True, extra_ids=extra_ids)


def random_weights(spec: ModelSpec, *, std: float = 0.7) -> dict[str, ParameterState]:
    """Return the same large random weights on every rank."""
    torch.manual_seed(3)
    return {
        name: ParameterState(weight=wrap_full_tensor(std * torch.randn(parameter.shape)))
        for name, parameter in parameters_of(spec).items()
    }


def of_ranks(groups: Groups | None) -> dict[str, Any]:
    """Return the arguments of a runner in fp32 on the CPU; default: of this process alone."""
    return {
        "groups": groups or lone_groups(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
