"""Encoder-decoder networks (T5): flags, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config.data.masks import MaskConfig
from megatron.config.network.model import ModelConfig
from megatron.config.network.model_problems import flag_problems, unbuilt_flags
from megatron.config.network.model_resolution import position_of
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parsing.declaration import range_problems, setting
from megatron.extensions.masked_lm.flags import MaskedLMConfig, MaskedLMPlan, SentencePlan


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Encoder and decoder (pretrain_t5.py). --num-layers, --seq-length are the encoder's."""

    decoder_num_layers: int | None = setting(None, at_least=1, plan="model.num_decoder_layers")
    """Number of transformer layers of the decoder (default: --num-layers)."""

    relative_attention_num_buckets: int = setting(32, plan="model.relative_buckets")
    """Buckets of distances with --position-embedding-type relative."""

    relative_attention_max_distance: int = setting(128, plan="model.relative_max_distance")
    """Distance in tokens from which on --position-embedding-type relative makes no difference."""


SECTIONS = {"encoder_decoder": EncoderDecoderConfig, "masked_lm": MaskedLMConfig}


def t5_samples(masked: MaskedLMConfig, *, seq_length: int) -> MaskedLMPlan:
    """Return the masked samples of T5."""
    return MaskedLMPlan(
        mask_prob=masked.mask_prob,
        has_binary_head=False,
        seq_length=seq_length,
        decoder_seq_length=masked.decoder_seq_length or 0,
    )


def t5_sentences(masked: MaskedLMConfig) -> SentencePlan:
    """Return how documents are cut, with room for two tokens in the encoder."""
    return SentencePlan(num_special=2, short_seq_prob=masked.short_seq_prob)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The decoder after an encoder of `num_layers`."""

    num_decoder_layers: int = 0
    decoder_seq_length: int = 0


def with_decoder(
    spec: ModelSpec,
    config: EncoderDecoderConfig,
    model: ModelConfig,
    *,
    decoder_seq_length: int,
) -> ModelSpec:
    """Return `spec`, an encoder's, with a decoder added."""
    longest = max(model.seq_length, decoder_seq_length)
    is_relative = spec.positions.position_embedding == "relative"
    positions = replace(
        spec.positions,
        max_position_embeddings=model.max_position_embeddings or longest,
        relative_buckets=config.relative_attention_num_buckets if is_relative else 0,
        relative_max_distance=config.relative_attention_max_distance if is_relative else 0,
    )
    decoder = DecoderSpec(
        num_decoder_layers=num_decoder_layers(config, model),
        decoder_seq_length=decoder_seq_length,
    )
    return replace(spec, positions=positions, own=decoder)


def num_decoder_layers(config: EncoderDecoderConfig, model: ModelConfig) -> int:
    """Return the number of layers of the decoder."""
    return model.num_layers if config.decoder_num_layers is None else config.decoder_num_layers


def encoder_decoder_problems(
    config: EncoderDecoderConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    decoder_seq_length: int,
) -> Iterator[str]:
    """Yield why a network with an encoder and a decoder cannot be built or divided."""
    layers = num_decoder_layers(config, model)
    yield from range_problems(config)
    positions = model.max_position_embeddings
    if positions is not None and positions < decoder_seq_length:
        yield (
            f"--max-position-embeddings {positions} is less than --decoder-seq-length "
            f"{decoder_seq_length}; every position needs a row"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and tensor > 1 and decoder_seq_length % tensor:
        yield (
            f"--sequence-parallel: --decoder-seq-length {decoder_seq_length} is not a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )
    if position_of(model) == "relative":
        yield from _relative_problems(config)
    if parallel.pipeline_model_parallel_split_rank is not None:
        yield from _split_problems(parallel, model.num_layers, layers)


def _relative_problems(config: EncoderDecoderConfig) -> Iterator[str]:
    buckets, distance = (
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
    )
    if buckets < 4 or buckets % 4:
        yield f"--relative-attention-num-buckets {buckets} must be a multiple of 4"
    elif distance <= buckets // 2:
        yield (
            f"--relative-attention-max-distance {distance} must be more than {buckets // 2}, half of "
            f"--relative-attention-num-buckets {buckets}"
        )


def _split_problems(parallel: ParallelConfig, encoder: int, decoder: int) -> Iterator[str]:
    split, stages = (
        parallel.pipeline_model_parallel_split_rank,
        parallel.pipeline_model_parallel_size,
    )
    flag = f"--pipeline-model-parallel-split-rank {split}"
    if split is None or not 0 < split < stages:
        yield (
            f"{flag} must be from 1 to {stages - 1}, less than --pipeline-model-parallel-size "
            f"{stages}: it is the first stage of the decoder"
            if stages > 1
            else f"{flag} needs --pipeline-model-parallel-size above 1"
        )
        return
    for name, layers, parts in (
        ("--num-layers", encoder, split),
        ("--decoder-num-layers", decoder, stages - split),
    ):
        if layers % parts:
            yield f"{flag}: {name} {layers} is not a multiple of its {parts} stages"


def unsupported_problems(
    model: ModelConfig, masks: MaskConfig, parallel: ParallelConfig, reason: str
) -> Iterator[str]:
    """Yield the flags of data and layout that networks with an encoder and a decoder do not have.

    Args:
        reason: end of the messages.
    """
    flags = {
        **unbuilt_flags(model, masks, parallel, positions=("learned", "relative")),
        "--eod-mask-loss": masks.eod_mask_loss,
        "--num-layers-per-virtual-pipeline-stage": bool(
            parallel.num_layers_per_virtual_pipeline_stage
        ),
        "--num-virtual-stages-per-pipeline-rank": bool(
            parallel.num_virtual_stages_per_pipeline_rank
        ),
    }
    return flag_problems(flags, reason)
