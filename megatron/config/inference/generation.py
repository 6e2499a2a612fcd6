"""What tools/generate_samples_gpt.py continues, and how it chooses tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Generation, as the user asked for it; --micro-batch-size is how many sequences at once.

    A prompt, a file of prompts, samples of nothing or, without these, prompts that are typed in.
    """

    prompt: str | None = None
    """Text to continue."""

    sample_input_file: str | None = None
    """File of prompts, one a line."""

    sample_output_file: str | None = None
    """Where the continued prompts go (default: the name of --sample-input-file with .out). A name
    that ends in .jsonl gets one JSON object a line."""

    num_samples: int = 0
    """Number of texts to make up from nothing, into --genfile."""

    genfile: str | None = None
    """File for texts made up from nothing: one JSON object a line with text, length, finished."""

    out_seq_length: int = 1024
    """Most tokens added to a prompt."""

    greedy: bool = False
    """Always take the likeliest token."""

    temperature: float = 1.0
    """Logits are divided by this: below 1 likely tokens become likelier; 0: as --greedy."""

    top_k: Annotated[int, Spelling("--top_k", ("--top-k",))] = 0
    """Choose among so many likeliest tokens; 0: among all."""

    top_p: Annotated[float, Spelling("--top_p", ("--top-p",))] = 0.0
    """Choose among the likeliest tokens that together have this probability; 0: among all."""

    beam_width: Annotated[int | None, Spelling("--beam-width", ("--beam_width",))] = None
    """Search for the likeliest continuation, with so many kept at each step, instead of choosing
    token by token."""

    length_penalty: Annotated[float, Spelling("--length-penalty", ("--length_penalty",))] = 1.0
    """Log-probabilities of --beam-width are divided by the length to this power; 0 favours short
    continuations."""

    stop_strings: list[str] | None = None
    """Texts at which a continuation ends; they are not written."""

    stop_tokens: list[int] | None = None
    """Tokens at which a continuation ends, besides the end-of-document token."""

    logprobs: bool = False
    """Write the log-probability of every token of the prompt and of its continuation, into files
    of JSON objects."""

    recompute: bool = False
    """Read the whole text again for each token, instead of keeping keys and values of attention."""

    inference_max_seq_length: int | None = None
    """Most tokens of a prompt and its continuation, for which there is memory from the beginning
    (default: --max-position-embeddings)."""

    inference_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of weights and activations; auto: that of training, or what --bf16 and --fp16
    say, and fp32 instead of fp16 on CPUs."""
