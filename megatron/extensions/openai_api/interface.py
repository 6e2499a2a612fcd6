"""Interface of this extension for the server: its paths, and their error bodies."""

from fastapi import FastAPI

from megatron.extensions.openai_api.completions import add_openai_api
from megatron.extensions.openai_api.errors import openai_error
from megatron.extensions.openai_api.tokenization import add_tokenization
from megatron.inference.server.served_model import ServedModel


def add_interface(app: FastAPI, served: ServedModel) -> None:
    """Add the paths under /v1, and those of tokenization."""
    add_openai_api(app, served)
    add_tokenization(app, served)


INTERFACE = add_interface

ERROR_BODIES = dict.fromkeys(("/v1/", "/tokenize", "/detokenize"), openai_error)
"""Forms of errors by the beginning of a path."""
