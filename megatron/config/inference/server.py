"""The text generation server: address, API key, request limits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from megatron.config.inference.generation import GenerationConfig, sampling_problems
from megatron.config.network.model_spec import Architecture
from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The text generation server; --micro-batch-size is the number of sequences in a batch."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine reaches the default, 0.0.0.0 is all addresses."""

    port: int = 5000
    """Port to listen on; 0: any free one, which the log names."""

    api_key: str | None = None
    """API key that every request must carry: Authorization: Bearer TEXT."""

    api_key_file: str | None = None
    """File with the API key; unlike --api-key, other users of the machine do not see it."""

    served_model_name: str | None = None
    """Name of the model in /v1/models (default: the last folder of --load)."""

    chat_template: str | None = None
    """File with the Jinja chat template of /v1/chat/completions (default: the
    checkpoint's, or the tokenizer's)."""

    max_prompts: int = 128
    """Maximum number of prompts of a request."""

    max_request_tokens: Annotated[
        int, Spelling("--max-request-tokens", ("--max-tokens-to-oom",))
    ] = 12000
    """Maximum number of tokens of a request: prompts and continuations."""

    max_body_bytes: int = 1 << 20
    """Maximum size of a request in bytes."""

    max_queue: int = 1024
    """Length of the queue, in sequences; while it is full, further requests are refused."""

    shutdown_grace: float = 30.0
    """Seconds for running requests to finish after SIGTERM."""

    request_timeout: float = 60.0
    """Timeout in seconds for the headers of a request, and for its body."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request, and of the queue."""

    new_tokens: int  # for each prompt
    prompts: int
    request_tokens: int  # of all prompts and their continuations
    body_bytes: int
    queue: int  # waiting sequences
    grace_s: float  # for running requests to finish
    request_s: float  # for the headers of a request, and for its body, to arrive


def plan_limits(server: ServingConfig, generation: GenerationConfig) -> Limits:
    """Return the limits of requests and of the queue."""
    return Limits(
        new_tokens=generation.out_seq_length,
        prompts=server.max_prompts,
        request_tokens=server.max_request_tokens,
        body_bytes=server.max_body_bytes,
        queue=server.max_queue,
        grace_s=server.shutdown_grace,
        request_s=server.request_timeout,
    )


def encoder_problems(
    server: ServingConfig, generation: GenerationConfig, architecture: Architecture
) -> Iterator[str]:
    """Yield the flags that have no effect on a server of a BERT or T5."""
    default = GenerationConfig()
    given = {
        "--chat-template": server.chat_template is not None,
        "--recompute": generation.recompute,
        "--inference-max-seq-length": generation.inference_max_seq_length is not None,
    }
    if architecture == "bert":
        given["--temperature"] = generation.temperature != default.temperature
        given["--top_k"] = generation.top_k != default.top_k
        given["--top_p"] = generation.top_p != default.top_p
        given["--out-seq-length"] = generation.out_seq_length != default.out_seq_length
    if found := [flag for flag, on in given.items() if on]:
        yield f"these have no effect on a {architecture.upper()}; leave them out: {', '.join(found)}"


def serving_problems(server: ServingConfig, generation: GenerationConfig) -> Iterator[str]:
    """Yield every problem of the server's flags."""
    if not 0 <= server.port <= 65535:
        yield f"--port {server.port} must be between 0 and 65535"
    if server.api_key is not None and server.api_key_file is not None:
        yield "give --api-key or --api-key-file, not both"
    if server.api_key == "":
        yield "--api-key is empty: leave it out, or give the text that requests must carry"
    for flag, value in (
        ("--max-prompts", server.max_prompts),
        ("--max-request-tokens", server.max_request_tokens),
        ("--max-body-bytes", server.max_body_bytes),
        ("--max-queue", server.max_queue),
        ("--out-seq-length", generation.out_seq_length),
    ):
        if value < 1:
            yield f"{flag} {value} must be at least 1"
    yield from sampling_problems(generation)
    if server.shutdown_grace < 0:
        yield f"--shutdown-grace {server.shutdown_grace} must be at least 0 seconds"
    if not 0 < server.request_timeout < float("inf"):
        yield f"--request-timeout {server.request_timeout} must be a number of seconds above 0"
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
    if given := [flag for flag, on in of_a_request.items() if on]:
        yield f"these are set by each request; leave them out: {', '.join(given)}"
