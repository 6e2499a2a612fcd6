"""What tools/generate_samples_gpt.py continues, and how it chooses tokens."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Generation, as the user asked for it: a prompt, a file of prompts, or samples of nothing."""

    prompt: str | None = None
    """Text to continue."""

    sample_input_file: str | None = None
    """File of prompts, one a line."""

    sample_output_file: str | None = None
    """Where the continued prompts of --sample-input-file go; its name with .out when not said."""

    num_samples: int = 0
    """Number of texts to make up from nothing, into --genfile."""

    genfile: str | None = None
    """File for texts made up from nothing: one JSON object a line with text, length, finished."""

    out_seq_length: int = 1024
    """Most tokens added to a prompt."""

    greedy: bool = False
    """Always take the likeliest token."""

    temperature: float = 1.0
    """Logits are divided by this: below 1 likely tokens become likelier."""

    top_k: Annotated[int, Spelling("--top_k", ("--top-k",))] = 0
    """Choose among so many likeliest tokens; 0: among all."""

    top_p: Annotated[float, Spelling("--top_p", ("--top-p",))] = 0.0
    """Choose among the likeliest tokens that together have this probability; 0: among all."""
