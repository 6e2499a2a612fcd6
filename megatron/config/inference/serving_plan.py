"""What a server takes on, decided."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.generation_plan import sampling_problems
from megatron.config.inference.serving import ServingConfig


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
