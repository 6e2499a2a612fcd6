"""Text generation: flags, resolution and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.config.network.model_problems import query_group_problems
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelConfig, world_size_problems
from megatron.config.parallelism.precision import PrecisionConfig
from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen."""

    greedy: bool = False
    """Always choose the most likely token."""

    temperature: float = setting(1.0, at_least=0, remedy="; 0 is as --greedy")
    """Divisor of the logits: below 1 favours likely tokens; 0: as --greedy."""

    top_k: int = setting(0, at_least=0, flag="--top_k", older=("--top-k",))
    """Sample from the N most likely tokens; 0: from all."""

    top_p: float = setting(0.0, at_least=0, at_most=1, flag="--top_p", older=("--top-p",))
    """Sample from the most likely tokens whose probabilities sum up to this (nucleus sampling); 0: from all."""


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(SamplingConfig):
    """How tokens are chosen, one by one or by beam search, and in which dtype."""

    beam_width: int | None = setting(None, at_least=1, older=("--beam_width",))
    """Beam search for the most likely continuation with this number of beams, instead of sampling."""

    length_penalty: float = setting(1.0, older=("--length_penalty",))
    """Log-probabilities of --beam-width are divided by the length to this power; 0 favours short
    continuations."""

    inference_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of weights and activations; auto: as in training, unless --bf16 or --fp16 is given, and
    fp32 instead of fp16 on CPUs."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(DecodingConfig):
    """Text generation; --micro-batch-size is the number of sequences in a batch.

    Continues a prompt or a file of prompts, generates without a prompt, or reads typed prompts.
    """

    prompt: str | None = None
    """Text to continue."""

    sample_input_file: str | None = None
    """File of prompts, one a line."""

    sample_output_file: str | None = None
    """Output file of the continued prompts (default: the name of --sample-input-file with .out). A
    name that ends in .jsonl gets one JSON object a line."""

    num_samples: int = setting(0, at_least=0)
    """Number of texts to generate without a prompt, into --genfile."""

    genfile: str | None = None
    """File for texts generated without a prompt: one JSON object a line with text, length, finished."""

    out_seq_length: int = setting(1024, at_least=1)
    """Maximum number of tokens generated after a prompt."""

    stop_strings: list[str] | None = None
    """Texts at which a continuation ends; they are not written."""

    stop_tokens: list[int] | None = None
    """Tokens at which a continuation ends, besides the end-of-document token."""

    logprobs: bool = False
    """Write the log-probability of every token of the prompt and of its continuation, into files
    of JSON objects."""

    recompute: bool = False
    """Recompute the full text for each token, instead of keeping a KV cache."""

    decode_graphs: bool = True
    """Do not capture decode steps on GPUs as CUDA graphs, which replay a step's kernels in one launch."""

    prefix_caching: bool = True
    """Compute every prompt in full, instead of reusing what the KV cache has of its first tokens."""

    max_num_batched_tokens: int = setting(2048, at_least=1)
    """Maximum number of prompt tokens in one forward pass, padding included; a longer prompt is
    computed in chunks, with decode steps of other sequences between them."""

    prompt_lookup_num_tokens: int = setting(0, at_least=0)
    """Speculative decoding by prompt lookup: number of draft tokens, which followed the latest two or
    three tokens earlier in the text; 0: none. The output stays the same."""

    inference_max_seq_length: int | None = None
    """Length of the KV cache: most tokens of a prompt and its continuation (default: --max-position-embeddings)."""


Dtype = Literal["fp32", "bf16", "fp16"]

LAYOUT = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
"""Fields of the layout, which do not follow from the run that trained the model."""


def inference_dtype(
    generation: DecodingConfig, precision: PrecisionConfig, *, device: str
) -> Dtype:
    """Return the dtype of weights and activations."""
    if generation.inference_dtype != "auto":
        return generation.inference_dtype
    if precision.bf16:
        return "bf16"
    return "fp16" if precision.fp16 and device != "cpu" else "fp32"


def generation_problems(generation: GenerationConfig) -> Iterator[str]:
    """Yield every contradiction between the flags of generation."""
    modes = {
        "--prompt": generation.prompt is not None,
        "--sample-input-file": generation.sample_input_file is not None,
        "--num-samples": generation.num_samples != 0,
    }
    given = [flag for flag, on in modes.items() if on]
    if len(given) > 1:
        yield f"give one of {', '.join(modes)}, or none to type prompts; found {' and '.join(given)}"
    if generation.num_samples and not generation.genfile:
        yield "--num-samples needs --genfile: the file to write the texts to"
    if generation.genfile and not generation.num_samples:
        yield "--genfile needs --num-samples: how many texts to generate"
    if generation.logprobs and not (generation.num_samples or _has_objects(generation)):
        yield "--logprobs needs a file of JSON objects: --genfile, or --sample-output-file ….jsonl"
    if generation.sample_output_file and (generation.num_samples or not given):
        yield "--sample-output-file is for --prompt and --sample-input-file"
    yield from sampling_problems(generation)
    yield from beam_problems(
        generation,
        {
            "--recompute": generation.recompute,
            "--stop-strings": generation.stop_strings,
            "--logprobs": generation.logprobs,
            "--num-samples": generation.num_samples,
            "--prompt-lookup-num-tokens": generation.prompt_lookup_num_tokens,
        },
    )


def sampling_problems(generation: SamplingConfig) -> Iterator[str]:
    """Yield every problem of the sampling flags, for any vocabulary."""
    yield from range_problems(generation)
    if generation.greedy and (
        generation.top_k or generation.top_p or generation.temperature not in (0, 1)
    ):
        yield "--greedy always chooses the most likely token: leave --top_k, --top_p and --temperature out"
    if generation.top_k and generation.top_p:
        yield "--top_k and --top_p exclude each other: give one of them"


def candidate_problems(generation: DecodingConfig, *, vocab_size: int) -> Iterator[str]:
    """Yield the flags that need more tokens to choose from than there are."""
    for flag, count in (("--top_k", generation.top_k), ("--beam-width", generation.beam_width)):
        if (count or 0) > vocab_size:
            yield f"{flag} {count} is more than the vocabulary's {vocab_size} tokens"


def vocabulary_problems(generation: GenerationConfig, *, vocab_size: int) -> Iterator[str]:
    """Yield every problem of the decoding flags with this vocabulary."""
    yield from candidate_problems(generation, vocab_size=vocab_size)
    for token in generation.stop_tokens or ():
        if not 0 <= token < vocab_size:
            yield f"--stop-tokens {token} is not in the vocabulary of {vocab_size} tokens"


def beam_problems(generation: DecodingConfig, options: Mapping[str, object]) -> Iterator[str]:
    """Yield every problem of the flags of a beam search.

    Args:
        own: further flags of the tool that do not go with it, with their values.
    """
    if generation.beam_width is None:
        if generation.length_penalty != 1:
            yield "--length-penalty is for --beam-width"
        return
    others = {
        "--greedy": generation.greedy,
        "--temperature": generation.temperature != 1,
        "--top_k": generation.top_k,
        "--top_p": generation.top_p,
        **options,
    }
    if given := [flag for flag, on in others.items() if on]:
        yield f"--beam-width does not go with {', '.join(given)}"


def _has_objects(generation: GenerationConfig) -> bool:
    return (generation.sample_output_file or "").endswith(".jsonl")


def layout_problems(
    parallel: ParallelConfig, spec: ModelSpec, *, world_size: int, replicas: int = 1
) -> Iterator[str]:
    """Yield every reason why `world_size` processes cannot share the network."""
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    if wrong := [*world_size_problems(parallel, world_size)]:
        yield from wrong
        return
    if tensor < 1 or pipeline < 1 or tensor * pipeline * replicas != world_size:
        yield (
            f"--tensor-model-parallel-size {tensor} * --pipeline-model-parallel-size {pipeline} "
            f"are {tensor * pipeline} processes, and {world_size} were started; start as many, as "
            f"`deepspeed --num_gpus {max(1, tensor * pipeline)} …` does, or give other sizes"
        )
        return
    for name, size in (
        ("--num-attention-heads", spec.attention.num_attention_heads),
        ("--ffn-hidden-size", spec.mlp.ffn_hidden_size),
    ):
        if size % tensor:
            yield f"{name} {size} is not a multiple of --tensor-model-parallel-size {tensor}"
    attention = spec.attention
    yield from query_group_problems(attention.num_query_groups, attention.head_dim, tensor)
    yield from spec.network.division_problems(spec, tensor=tensor)
    if pipeline > spec.num_layers:
        yield (
            f"--pipeline-model-parallel-size {pipeline} is more than --num-layers "
            f"{spec.num_layers}: a stage would have no layer"
        )


def batch_problems(rows: int) -> Iterator[str]:
    """Yield why --micro-batch-size is not a number of sequences."""
    if rows < 1:
        yield f"--micro-batch-size {rows} must be at least 1"


def room_problems(generation: GenerationConfig, spec: ModelSpec, *, rows: int) -> Iterator[str]:
    """Yield every problem of the size of the KV cache."""
    yield from batch_problems(rows)
    given = generation.inference_max_seq_length
    if given is not None and not 2 <= given <= spec.positions.max_position_embeddings:
        yield (
            f"--inference-max-seq-length {given} must be between 2 and --max-position-embeddings "
            f"{spec.positions.max_position_embeddings}"
        )


def dtype_problems(dtype: Dtype, *, device: str) -> Iterator[str]:
    """Yield why `device` does not compute in this dtype."""
    if dtype == "fp16" and device == "cpu":
        yield "--inference-dtype fp16 needs a GPU: write bf16 or fp32"
