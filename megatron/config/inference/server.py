"""The text generation server: address, API key, request limits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from megatron.config.inference.generation import GenerationConfig, sampling_problems
from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The server, as the user asked for it; --micro-batch-size is how many sequences at once."""

    host: str = "127.0.0.1"
    """Address to listen at; this machine alone can reach the default, 0.0.0.0 is all addresses."""

    port: int = 5000
    """Port to listen at; 0: any that is free, and the log says which."""

    api_key: str | None = None
    """Text that every request must bear: Authorization: Bearer TEXT."""

    api_key_file: str | None = None
    """File with the text of --api-key, which other users of the machine cannot see then."""

    served_model_name: str | None = None
    """What /v1/models calls the model (default: the last folder of --load)."""

    chat_template: str | None = None
    """File with the Jinja chat template of /v1/chat/completions (default: the
    checkpoint's, or the tokenizer's)."""

    max_prompts: int = 128
    """Most prompts of a request."""

    max_request_tokens: Annotated[
        int, Spelling("--max-request-tokens", ("--max-tokens-to-oom",))
    ] = 12000
    """Most tokens of a request: those of its prompts, and those that may follow each."""

    max_body_bytes: int = 1 << 20
    """Most bytes of a request."""

    max_queue: int = 1024
    """So many sequences may wait for their turn; while they do, further requests are refused."""

    shutdown_grace: float = 30.0
    """Seconds in which the requests under way may be finished after SIGTERM."""

    request_timeout: float = 60.0
    """Seconds within which the headers of a request must arrive, and as many for its body."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may ask for, and how much may wait."""

    new_tokens: int  # for each prompt
    prompts: int
    request_tokens: int  # of all prompts, with what may follow
    body_bytes: int
    queue: int  # sequences that wait for their turn
    grace_s: float  # to finish what is under way
    request_s: float  # for the headers of a request, and for its body, to arrive


def plan_limits(wishes: ServingConfig, generation: GenerationConfig) -> Limits:
    """Return what requests may ask for."""
    return Limits(
        new_tokens=generation.out_seq_length,
        prompts=wishes.max_prompts,
        request_tokens=wishes.max_request_tokens,
        body_bytes=wishes.max_body_bytes,
        queue=wishes.max_queue,
        grace_s=wishes.shutdown_grace,
        request_s=wishes.request_timeout,
    )


def serving_problems(wishes: ServingConfig, generation: GenerationConfig) -> Iterator[str]:
    """Yield every reason why nothing can be served so."""
    if not 0 <= wishes.port <= 65535:
        yield f"--port {wishes.port} must be between 0 and 65535"
    if wishes.api_key is not None and wishes.api_key_file is not None:
        yield "give --api-key or --api-key-file, not both"
    if wishes.api_key == "":
        yield "--api-key is empty: leave it out, or give the text that requests must bear"
    for flag, value in (
        ("--max-prompts", wishes.max_prompts),
        ("--max-request-tokens", wishes.max_request_tokens),
        ("--max-body-bytes", wishes.max_body_bytes),
        ("--max-queue", wishes.max_queue),
        ("--out-seq-length", generation.out_seq_length),
    ):
        if value < 1:
            yield f"{flag} {value} must be at least 1"
    yield from sampling_problems(generation)
    if wishes.shutdown_grace < 0:
        yield f"--shutdown-grace {wishes.shutdown_grace} must be at least 0 seconds"
    if not 0 < wishes.request_timeout < float("inf"):
        yield f"--request-timeout {wishes.request_timeout} must be a number of seconds above 0"
    of_a_request = {
        "--prompt": generation.prompt is not None,
        "--sample-input-file": generation.sample_input_file is not None,
        "--sample-output-file": generation.sample_output_file is not None,
        "--num-samples": generation.num_samples,
        "--genfile": generation.genfile is not None,
        "--greedy": generation.greedy,
        "--beam-width": generation.beam_width is not None,
        "--length-penalty": generation.length_penalty != 1,
        "--stop-strings": generation.stop_strings,
        "--stop-tokens": generation.stop_tokens,
        "--logprobs": generation.logprobs,
    }
    if said := [flag for flag, on in of_a_request.items() if on]:
        yield f"each request says this for itself, so leave it out: {', '.join(said)}"
