"""Compare the logits of a checkpoint and of the transformers model made from it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.common.errors import CheckpointError, DataError
from megatron.config.architecture.architecture import network_of
from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.dtypes import TORCH_DTYPES
from megatron.tokenizer.types.tokenizer import Tokenizer

BOUNDS = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Tolerance of logits relative to the largest one, by dtype."""

_TEXT = (
    "A language model gives every token a probability, given the tokens before it. The same "
    "weights must give the same numbers in both programs: 1, 2, 3, 3.14159 and 10,000. "
    "def add(a, b):\n    return a + b\n\nNaïve café, Übermut, 東京, здравствуйте."
)
_LENGTH = 256  # tokens in a sample, at most


@dataclass(frozen=True)
class LogitDifference:
    """Difference between transformers' logits and ours.

    Args:
        dtype: of transformers' model; ours computes in fp32.
        weights: dtype that our weights were rounded to.
        error: the largest difference.
        largest: the largest of our logits.
        agreement: share of positions with the same largest logit.
        positions: number of positions compared.
        predicts: meaning of the largest logit of a position; "" for none.
    """

    dtype: str
    weights: str
    error: float
    largest: float
    agreement: float
    positions: int
    predicts: str = "token"

    @property
    def largest_allowed(self) -> float:
        """The largest difference allowed."""
        return BOUNDS[self.dtype] * max(1.0, self.largest)

    @property
    def is_equal(self) -> bool:
        """Whether the difference is within rounding."""
        return self.error <= self.largest_allowed

    def __str__(self) -> str:
        agreement = (
            f"; the most likely {self.predicts} is the same in {self.agreement:.1%} of "
            f"{self.positions} positions"
        )
        return (
            f"transformers in {self.dtype}, ours in fp32 with weights in {self.weights}: logits "
            f"differ by {self.error:.2g} at most (bound {self.largest_allowed:.2g}, largest logit "
            f"{self.largest:.3g}){agreement if self.predicts else ''}"
        )


def sample_tokens(spec: ModelSpec, tokenizer: Tokenizer) -> Tensor:
    """Return two samples: tokens of a text, and ids spread over the vocabulary.

    Shapes: [2, s] int64.
    """
    length = min(_LENGTH, spec.positions.max_position_embeddings)
    spread = [position * 7919 % spec.vocabulary.vocab_size for position in range(1, length + 1)]
    try:
        text = tokenizer.encode(_TEXT)
    except DataError:
        # A NullTokenizer cannot encode text.
        text = spread[::-1]
    return torch.tensor([(text * length)[:length], spread])


def compare(
    spec: ModelSpec,
    checkpoint: FullCheckpoint,
    folder: Path,
    tokens_bs: Tensor,
    stored: str,
    *,
    auto_class: str,
) -> list[LogitDifference]:
    """Compare the logits of the transformers model in `folder` with ours.

    In fp32, ours has its weights rounded to the dtype of the files. In that dtype, ours has the
    checkpoint's weights and computes in fp32.

    Args:
        stored: dtype of the files.
        auto_class: name of the model's auto class in transformers.

    Memory: one fp32 model at a time.

    Positions are those of texts as long as the sample, which LongRoPE depends on.

    Raises:
        CheckpointError: transformers cannot load it, or only in part.
    """
    measured = []
    spec = replace(spec, seq_length=tokens_bs.size(1))
    is_encoder = auto_class == "AutoModel"
    for dtype, weights in dict.fromkeys([("fp32", stored), (stored, "fp32")]):
        ours = _our_logits(
            spec, checkpoint, TORCH_DTYPES[weights], tokens_bs, is_encoder=is_encoder
        )
        model = load_transformers(folder, TORCH_DTYPES[dtype], auto_class)
        theirs = _their_logits(spec, model, tokens_bs)
        del model
        # A model for masked words alone has no logits of the order of segments.
        errors = [(a - b).abs().max() for a, b in zip(ours, theirs, strict=False)]
        logits, others = ours[0], theirs[0]
        measured.append(
            LogitDifference(
                dtype=dtype,
                weights=weights,
                error=float(torch.stack(errors).max().nan_to_num(torch.inf)),
                largest=float(logits.abs().max()),
                agreement=float((logits.argmax(-1) == others.argmax(-1)).float().mean()),
                positions=len(logits),
                predicts="" if is_encoder else network_of(spec).predicts(spec),
            )
        )
    return measured


def require_equal(measured: Sequence[LogitDifference]) -> None:
    """Refuse a conversion whose logits differ by more than rounding.

    Raises:
        CheckpointError: with the differences.
    """
    if worse := [str(one) for one in measured if not one.is_equal]:
        raise CheckpointError(
            "the two models compute different logits; nothing was written:\n" + "\n".join(worse)
        )


def load_transformers(folder: Path, dtype: torch.dtype, auto_class: str) -> nn.Module:
    """Load the transformers model in `folder` on the CPU, in eval mode.

    Args:
        auto_class: name of the model's auto class in transformers.

    Raises:
        CheckpointError: it cannot be loaded, or only in part.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    load: Callable[..., Any] = getattr(transformers, auto_class).from_pretrained
    try:
        model, report = load(
            str(folder),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    left: dict[str, Any] = {
        kind: sorted(map(str, report.get(kind) or ()))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    # Models without these layers ignore them by the numbers that they have in published files.
    layers = int(model.config.get_text_config().num_hidden_layers)
    left["unexpected_keys"] = [k for k in left["unexpected_keys"] if not _is_behind(k, layers)]
    if any(left.values()):
        raise CheckpointError(f"transformers loads {folder} in part: {left}")
    return model.eval()


def _is_behind(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer after the last one: of multi-token prediction."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers


@torch.no_grad()
def _our_logits(
    spec: ModelSpec,
    checkpoint: FullCheckpoint,
    rounded_to: torch.dtype,
    tokens_bs: Tensor,
    *,
    is_encoder: bool,
) -> list[Tensor]:
    """Compute the logits of real tokens, without padding of the vocabulary, and of other heads.

    The model is freed on return.

    Args:
        is_encoder: compute the outputs of the encoder and its pooler instead.
    """
    positions_bs = torch.arange(tokens_bs.size(1)).expand_as(tokens_bs)
    batch = {"tokens": tokens_bs, "positions": positions_bs}
    if network_of(spec).is_causal:
        logits_bsv = load_network(spec, checkpoint, rounded_to=rounded_to)(batch)
        return [logits_bsv[..., : network_of(spec).num_logits(spec)].flatten(0, 1)]
    types_bs, real_bs = _segments(tokens_bs)
    lengths_b = real_bs.sum(1)
    span_b12 = torch.stack([torch.zeros_like(lengths_b), lengths_b], -1)[:, None]
    batch |= {"token_types": types_bs, "attention_span": span_b12}
    if network_of(spec).rows(spec) > 1:
        # Both samples are choices of one question.
        batch = {name: field[None] for name, field in batch.items()} | {
            "attention_span": span_b12[:, 0][None]
        }
    network = load_network(spec, checkpoint, rounded_to=rounded_to)
    if is_encoder:
        return _encode(network, batch, real_bs)
    output = network(batch)
    if spec.head:
        return [_head_logits(output, real_bs, spec)]
    return [output.logits[real_bs][:, : spec.vocabulary.vocab_size], output.order_logits]


def _encode(network: nn.Module, batch: dict[str, Tensor], real_bs: Tensor) -> list[Tensor]:
    """Return the outputs of an encoder for real tokens, and of its pooler."""
    found: list[Tensor] = []
    head: Any = next(each for each in network.modules() if hasattr(each, "pooler"))
    head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    network(batch)
    (x_bsh,) = found
    return [x_bsh[real_bs], head.pooler(x_bsh[:, 0]).tanh()]


@torch.no_grad()
def _their_logits(spec: ModelSpec, model: Any, tokens_bs: Tensor) -> list[Tensor]:
    """Return the outputs of transformers' model in the form of `_our_logits`."""
    if network_of(spec).is_causal and spec.head:
        # Of every token: the model itself returns only the last unpadded token's logits.
        hidden_bsh = model.base_model(tokens_bs).last_hidden_state
        return [model.score(hidden_bsh).float().flatten(0, 1)]
    if network_of(spec).is_causal:
        return [model(tokens_bs).logits.float()[..., : spec.vocabulary.vocab_size].flatten(0, 1)]
    types_bs, real_bs = _segments(tokens_bs)
    inputs = {
        "input_ids": tokens_bs,
        "attention_mask": real_bs.long(),
        "token_type_ids": types_bs,
    }
    if network_of(spec).rows(spec) > 1:
        inputs = {name: field[None] for name, field in inputs.items()}
    output = model(**inputs)
    if "start_logits" in output:
        return [
            _head_logits(torch.stack([output.start_logits, output.end_logits], -1), real_bs, spec)
        ]
    if spec.head:
        return [_head_logits(output.logits, real_bs, spec)]
    if "pooler_output" in output:
        return [output.last_hidden_state.float()[real_bs], output.pooler_output.float()]
    if "logits" in output:  # of masked words alone
        return [output.logits.float()[real_bs][:, : spec.vocabulary.vocab_size]]
    logits_bsv, order_b2 = output.prediction_logits, output.seq_relationship_logits
    return [logits_bsv.float()[real_bs][:, : spec.vocabulary.vocab_size], order_b2.float()]


def _head_logits(logits: Tensor, real_bs: Tensor, spec: ModelSpec) -> Tensor:
    """Return the logits of a downstream head for each real token, sample or choice.

    Shapes: [b, s, C] or [b, C] -> [n, C] float32.
    """
    network = network_of(spec)
    real_logits = logits[real_bs] if network.scores_tokens(spec) else logits
    return real_logits.float().reshape(-1, network.num_logits(spec))


def _segments(tokens_bs: Tensor) -> tuple[Tensor, Tensor]:
    """Return token types of two segments, and which tokens are real: the last sample has padding.

    Outputs at padding differ between programs, and reach nothing.
    """
    size = tokens_bs.size(1)
    positions_bs = torch.arange(size).expand_as(tokens_bs)
    real_bs = torch.ones_like(tokens_bs, dtype=torch.bool)
    real_bs[-1, size - size // 4 :] = False
    return (positions_bs >= size // 3).long(), real_bs
