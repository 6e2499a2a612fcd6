"""A tiny T5 with random weights."""

from pathlib import Path

from encoders import of_ranks, random_weights, tokenizer_in
from tiny import tiny_spec

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.t5.inference import TextToText
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.runner.model_runner import ModelRunner
from megatron.tensor_parallel.process_groups import Groups

T5_SPEC = tiny_spec(
    **{"architecture": "t5", "num_decoder_layers": 3, "decoder_seq_length": 6},
    **{"padded_vocab_size": 16, "vocab_size": 14, "max_position_embeddings": 9},
)


def t5_engine(
    spec: ModelSpec = T5_SPEC, *, rows: int = 1, groups: Groups | None = None
) -> InferenceEngine:
    weights = random_weights(spec)
    runner = ModelRunner(spec, weights, rows=rows, packs_weights=False, **of_ranks(groups))
    return InferenceEngine(runner, rows=rows)


def text_to_text(folder: Path, spec: ModelSpec = T5_SPEC, *, rows: int = 1) -> TextToText:
    return TextToText(t5_engine(spec, rows=rows), tokenizer_in(folder, extra_ids=3))
