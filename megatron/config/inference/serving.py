"""Whom tools/run_text_generation_server.py answers, and how much it takes on."""

from dataclasses import dataclass
from typing import Annotated

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
