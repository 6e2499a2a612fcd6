"""A tiny BERT with random weights."""

from pathlib import Path

from encoders import of_ranks, random_weights, tokenizer_in
from tiny import tiny_spec

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.bert.inference import MaskedLM
from megatron.extensions.bert.layers import bert_layers
from megatron.inference.engine.encoder_runner import EncoderRunner
from megatron.tensor_parallel.process_groups import Groups

BERT_SPEC = tiny_spec(
    **{"architecture": "bert", "num_token_types": 2, "binary_head": True},
    max_position_embeddings=9,
)


def bert_runner(spec: ModelSpec = BERT_SPEC, groups: Groups | None = None) -> EncoderRunner:
    weights = random_weights(spec, std=0.5)
    return EncoderRunner(spec, weights, layers=bert_layers, **of_ranks(groups))


def masked_lm(folder: Path) -> MaskedLM:
    return MaskedLM(bert_runner(), tokenizer_in(folder))
