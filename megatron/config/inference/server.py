"""The text generation server: address, API key, request limits."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.architecture.architecture import Architecture
from megatron.config.inference.generation import GenerationConfig, sampling_problems
from megatron.config.parsing.declaration import range_problems, resolve, setting


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The text generation server; --micro-batch-size is the number of sequences in a batch."""

    host: str = "127.0.0.1"
    """Address to listen on; the default accepts connections from this machine only, 0.0.0.0 listens
    on all interfaces."""

    port: int = setting(5000, at_least=0, at_most=65535)
    """Port to listen on; 0: any free one, which the log names."""

    api_key: str | None = None
    """API key required in every request: Authorization: Bearer TEXT."""

    api_key_file: str | None = None
    """File with the API key; unlike --api-key, other users of the machine do not see it."""

    served_model_name: str | None = None
    """Name of the model in /v1/models (default: the last folder of --load)."""

    chat_template: str | None = None
    """File with the Jinja chat template of /v1/chat/completions (default: the
    checkpoint's, or the tokenizer's)."""

    max_prompts: int = setting(128, at_least=1, plan="limits.prompts")
    """Maximum number of prompts of a request."""

    max_request_tokens: int = setting(
        12000, at_least=1, older=("--max-tokens-to-oom",), plan="limits.request_tokens"
    )
    """Maximum number of tokens of a request: prompts and continuations."""

    max_body_bytes: int = setting(1 << 20, at_least=1, plan="limits.body_bytes")
    """Maximum size of a request in bytes."""

    max_queue: int = setting(1024, at_least=1, plan="limits.queue")
    """Length of the queue, in sequences; while it is full, further requests are refused."""

    shutdown_grace: float = setting(30.0, at_least=0, remedy=" seconds", plan="limits.grace_s")
    """Seconds for running requests to finish after SIGTERM."""

    request_timeout: float = setting(60.0, plan="limits.request_s")
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
    return resolve(Limits, "limits", server, new_tokens=generation.out_seq_length)


def encoder_problems(
    server: ServingConfig, generation: GenerationConfig, network: type[Architecture]
) -> Iterator[str]:
    """Yield the flags that have no effect on a server that does not continue prompts."""
    default = GenerationConfig()
    given = {
        "--chat-template": server.chat_template is not None,
        "--recompute": generation.recompute,
        "--prompt-lookup-num-tokens": generation.prompt_lookup_num_tokens,
        "--no-prefix-caching": not generation.prefix_caching,
        "--max-num-batched-tokens": generation.max_num_batched_tokens
        != default.max_num_batched_tokens,
        "--inference-max-seq-length": generation.inference_max_seq_length is not None,
    }
    if network.service == "masks":
        given["--temperature"] = generation.temperature != default.temperature
        given["--top_k"] = generation.top_k != default.top_k
        given["--top_p"] = generation.top_p != default.top_p
        given["--out-seq-length"] = generation.out_seq_length != default.out_seq_length
    if found := [flag for flag, on in given.items() if on]:
        yield f"these have no effect on a {network.name.upper()}; leave them out: {', '.join(found)}"


def serving_problems(server: ServingConfig, generation: GenerationConfig) -> Iterator[str]:
    """Yield every problem of the server's flags."""
    yield from range_problems(server)
    if server.api_key is not None and server.api_key_file is not None:
        yield "give --api-key or --api-key-file, not both"
    if server.api_key == "":
        yield "--api-key is empty: leave it out, or give the text that requests must carry"
    yield from sampling_problems(generation)
    if not 0 < server.request_timeout < float("inf"):
        yield f"--request-timeout {server.request_timeout} must be a number of seconds above 0"
    request_flags = {
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
    if given := [flag for flag, on in request_flags.items() if on]:
        yield f"these are set by each request; leave them out: {', '.join(given)}"
