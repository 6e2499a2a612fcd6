"""Tiny BERT, T5 and Retro with random weights, their tokenizer, requests to Retro."""

from pathlib import Path
from typing import Any

import torch
from tiny import tiny_spec

from megatron.checkpointing.conversion.network import parameters_of
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, unsharded
from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.bert.inference import MaskedLM
from megatron.extensions.bert.layers import bert_layers
from megatron.extensions.t5.inference import TextToText
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.encoder_runner import EncoderRunner
from megatron.inference.engine.model_runner import ModelRunner
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.loading.loaded_model import lone_groups
from megatron.tensor_parallel.process_groups import Groups
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "##d", "[BOS]", "[EOS]"]
A, B, C, D, BOS, EOS, SENTINEL = range(5, 12)

T5_SPEC = tiny_spec(
    **{"architecture": "t5", "num_decoder_layers": 3, "decoder_seq_length": 6},
    **{"padded_vocab_size": 16, "vocab_size": 14, "max_position_embeddings": 9},
)
BERT_SPEC = tiny_spec(
    **{"architecture": "bert", "num_token_types": 2, "binary_head": True},
    max_position_embeddings=9,
)


RETRO_SPEC = tiny_spec(
    **{"architecture": "retro", "num_layers": 9, "retro_layers": (6, 9), "retro_encoder_layers": 2},
    **{"retro_chunk_length": 3, "retro_num_neighbors": 2, "retro_retrieved_length": 6},
    **{"seq_length": 16, "max_position_embeddings": 16, "tied_embeddings": False},
)
RETRO_PROMPTS = [
    ([1, 2, 3, 4, 5, 6, 7], [[3, 1, 4, 1, 5, 9], [2, 7]]),
    ([5], [[8, 8]]),
    ([9, 3], []),
    ([2, 2, 6], [[], [4, 9, 1, 1]]),
    ([7, 1, 7, 1, 7], [[6, 5, 4, 3, 2, 1], [1, 2, 3]]),
]
"""Prompts with their neighbors."""
RETRO_REQUESTS = [
    Request(
        prompt=tuple(prompt),
        contexts=tuple(map(tuple, neighbors)),
        max_new_tokens=5 - number % 2,
        sampling=SamplingParams(greedy=True),
        logprobs=True,
    )
    for number, (prompt, neighbors) in enumerate(RETRO_PROMPTS)
]


def tokenizer_in(folder: Path, *, extra_ids: int = 0) -> WordPieceTokenizer:
    """Return a WordPiece tokenizer whose vocabulary is written to `folder`."""
    (folder / "vocab.txt").write_text("\n".join(TOKENS))
    return WordPieceTokenizer(folder / "vocab.txt", lower_case=True, extra_ids=extra_ids)


def random_weights(spec: ModelSpec, *, std: float = 0.7) -> dict[str, ParameterState]:
    """Return the same large random weights on every rank."""
    torch.manual_seed(3)
    return {
        name: ParameterState(weight=unsharded(std * torch.randn(parameter.shape)))
        for name, parameter in parameters_of(spec).items()
    }


def t5_engine(
    spec: ModelSpec = T5_SPEC, *, rows: int = 1, groups: Groups | None = None
) -> InferenceEngine:
    runner = ModelRunner(
        spec, random_weights(spec), rows=rows, packs_weights=False, **_parts(groups)
    )
    return InferenceEngine(runner, rows=rows)


def bert_runner(spec: ModelSpec = BERT_SPEC, groups: Groups | None = None) -> EncoderRunner:
    weights = random_weights(spec, std=0.5)
    return EncoderRunner(spec, weights, layers=bert_layers, **_parts(groups))


def retro_engine(
    spec: ModelSpec = RETRO_SPEC,
    *,
    rows: int = 2,
    recompute: bool = False,
    groups: Groups | None = None,
) -> InferenceEngine:
    cache = 0 if recompute else rows
    runner = ModelRunner(spec, random_weights(spec), rows=cache, **_parts(groups))
    return InferenceEngine(runner, rows=rows, recompute=recompute)


def answers_of(engine: InferenceEngine) -> list[tuple[list[int], list[float | None]]]:
    """Return the tokens and log-probabilities that a Retro generates for RETRO_REQUESTS."""
    done = engine.generate(RETRO_REQUESTS)
    return [([*each.tokens], [one.logprob for one in each.new_tokens]) for each in done]


def _parts(groups: Groups | None) -> dict[str, Any]:
    return {
        "groups": groups or lone_groups(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }


def text_to_text(folder: Path, spec: ModelSpec = T5_SPEC, *, rows: int = 1) -> TextToText:
    return TextToText(t5_engine(spec, rows=rows), tokenizer_in(folder, extra_ids=3))


def masked_lm(folder: Path) -> MaskedLM:
    return MaskedLM(bert_runner(), tokenizer_in(folder))
