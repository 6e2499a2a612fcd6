#!/usr/bin/env python
"""Serve a trained GPT, BERT or T5 over HTTP, with a page to try it.

A GPT has PUT /api and OpenAI's completions and chat, a BERT POST /fill-mask and /embeddings, a T5
POST /text-to-text. The model is loaded as in tools/generate_samples_gpt.py. --temperature, --top_k
and --top_p are the defaults of PUT /api and POST /text-to-text; --out-seq-length is the maximum
number of new tokens of a request.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.errors import ConfigError, DataError, raise_if_any, reason
from megatron.common.standard_streams import keep_writable
from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.server import Limits, ServingConfig, plan_limits, serving_problems
from megatron.inference.loading.model_source import ModelSource, read_model_source
from megatron.training.process.environment import read_launch, read_launcher
from megatron.training.process.launch import run_tool_or_rank
from megatron.training.process.launchers import Launchers

if TYPE_CHECKING:  # torch takes seconds to import, and wrong flags are reported at once
    from megatron.inference.server.backend import Backend
    from megatron.inference.server.engine_thread import EngineThread
    from megatron.inference.server.served_model import ServedModel

_log = logging.getLogger(__name__)

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def main(argv: Sequence[str]) -> None:
    """Serve the model of the command line `argv` until a signal."""
    keep_writable()
    log.configure(read_launch(None).rank)
    sections = {"serving": ServingConfig, "generation": GenerationConfig}
    source = read_model_source(argv, sections, description=__doc__)
    generation: GenerationConfig = source.own["generation"]
    options: ServingConfig = source.own["serving"]
    raise_if_any(serving_problems(options, generation))
    _require_packages()
    api_key = read_api_key(options)

    from megatron.inference.server.app import build_app
    from megatron.inference.server.backend import load_backend
    from megatron.inference.server.engine_thread import EngineThread
    from megatron.inference.server.hosts import is_loopback
    from megatron.inference.server.server import Server, listener

    is_local = is_loopback(options.host)
    if read_launch(None).rank == 0:
        if api_key is None and not is_local:
            _log.warning(
                "--host %s without an API key: everyone who can reach this machine can use the "
                "model; set --api-key-file, or listen on --host 127.0.0.1 alone",
                options.host,
            )
        listener(options.host, options.port).close()  # a model takes long to load for a taken port
    backend = load_backend(source, generation, options)
    if not backend.is_first:
        # A launcher signals all ranks; the first rank ends the rest when no request is left.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        backend.engine.follow()
        return
    limits = plan_limits(options, generation)
    engine_thread = EngineThread(backend.engine, queue=limits.queue)
    app = build_app(
        _served_model(source, backend, engine_thread, limits),
        api_key=api_key,
        is_local=is_local,
        interfaces=backend.interfaces,
        page=backend.page,
    )
    server = Server(
        app,
        engine_thread,
        host=options.host,
        port=options.port,
        grace_s=limits.grace_s,
        headers_s=limits.request_s,
        launchers=Launchers(is_parent=bool(read_launcher().name)),
    )
    server.serve_until_stopped()


def _require_packages() -> None:
    if missing := [name for name in _PACKAGES if not find_spec(name)]:
        raise ConfigError(
            f"the server needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed: python -m pip install --requirement requirements-server.txt"
        )


def _served_model(
    source: ModelSource, backend: "Backend", engine_thread: "EngineThread", limits: Limits
) -> "ServedModel":
    """Return the model with the defaults of its requests."""
    from megatron.inference.engine.sampling import SamplingParams
    from megatron.inference.server.served_model import ServedModel

    generation: GenerationConfig = source.own["generation"]
    options: ServingConfig = source.own["serving"]
    return ServedModel(
        engine_thread=engine_thread,
        tokenizer=backend.tokenizer,
        vocab_size=backend.engine.runner.spec.vocabulary.vocab_size,
        limits=limits,
        name=options.served_model_name or Path(str(source.config.checkpoint.load)).resolve().name,
        sampling=SamplingParams(
            temperature=generation.temperature, top_k=generation.top_k, top_p=generation.top_p
        ),
        seed=source.config.training.seed,
        chat=backend.chat,
        fim=backend.fim,
    )


def read_api_key(options: ServingConfig) -> str | None:
    """Return the API key that requests must carry.

    Raises:
        DataError: the file cannot be read or is empty.
    """
    if options.api_key_file is None:
        return options.api_key
    try:
        text = Path(options.api_key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--api-key-file {options.api_key_file}: {reason(error, options.api_key_file)}"
        ) from error
    if not text:
        raise DataError(f"--api-key-file {options.api_key_file} is empty")
    return text


if __name__ == "__main__":
    run_tool_or_rank(main)
