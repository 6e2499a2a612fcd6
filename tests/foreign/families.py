"""One harness for all families of transformers: a random model of theirs, and ours with its weights.

A family is a config in `architectures.THEIRS`; `test_hugging_face_models.py` and `test_families_on_ranks.py`
take each of them through all of this.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import batch_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatron.checkpointing.hugging_face.families.family import Family
from megatron.checkpointing.hugging_face.import_model import ImportOptions, describe_model
from megatron.checkpointing.resharding.sharded_tensor import ParameterState
from megatron.config.network.model_spec import ModelSpec
from megatron.inference.runner.model_runner import ModelRunner
from megatron.tensor_parallel.process_groups import Groups

RELATIVE = 1e-5


def their_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model whose every weight matters: initial ones of a small network hide wrong formulas."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(std=0.2)
            else:
                tensor.add_(0.2 * torch.randn_like(tensor))
        for name, tensor in model.named_buffers():
            if name.endswith("correction_bias"):
                tensor.normal_(std=0.2)
    return model.to(dtype)


def sample(vocab_size: int = 30, length: int = 20) -> Tensor:
    """Return tokens [2, length], none of them a special one, whose rows may learn nothing."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(4, vocab_size, (2, length), generator=generator)


def spec_of(config: PretrainedConfig, folder: Path, length: int = 20) -> tuple[Family, ModelSpec]:
    """Return the family of a config and its network, as the importer understands them."""
    config.save_pretrained(folder)
    options = ImportOptions(seq_length=length)
    described = describe_model(folder, options, save=folder / "ours")
    return described.family, described.plan.model


def logits_and_gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of a network of ours, and the gradients of a loss by parameter."""
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    logits = model(batch_of(tokens, positions))
    loss_of(logits, tokens).backward()
    return logits.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def their_logits_and_gradients(
    model: PreTrainedModel, tokens: Tensor, folder: Path
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same of a model of theirs, gradients by the names of files; spends the model."""
    logits = model(tokens).logits
    loss_of(logits, tokens).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder)
    return logits.detach(), load_file(folder / "model.safetensors")


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def decoded_logits(
    spec: ModelSpec, weights: Mapping[str, ParameterState], tokens: Tensor, groups: Groups
) -> tuple[Tensor | None, Tensor]:
    """Prefill two sequences of different lengths, and decode the rest of the longer one's tokens.

    Returns:
        The logits [b, n, V] (None where another stage has them), and their positions [b, n].
    """
    runner = ModelRunner(
        spec,
        weights,
        groups=groups,
        dtype=torch.float32,
        device=torch.device("cpu"),
        rows=len(tokens),
        max_length=tokens.size(1),
    )
    lengths = torch.tensor([tokens.size(1) // 2 - 3 * row for row in range(len(tokens))])
    rows = torch.arange(len(tokens))
    prompts = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    hidden = [runner.prefill(prompts, lengths.tolist())[rows, lengths - 1]]
    positions_bn = lengths[:, None] + torch.arange(-1, tokens.size(1) - int(lengths.max()))
    for now in positions_bn[:, 1:].T:
        hidden.append(runner.decode(tokens[rows, now].tolist(), now.tolist())[:, 0])
    if not runner.has_logits:
        return None, positions_bn
    return torch.stack([runner.logits(x) for x in hidden], 1), positions_bn


def require_close(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Compare by the largest number expected: small ones are sums of large ones."""
    largest = float(expected.abs().max())
    torch.testing.assert_close(
        found, expected, rtol=0, atol=RELATIVE * max(largest, 1e-3), msg=lambda m: f"{what}: {m}"
    )
