"""Interface of this extension for the server: the paths under /v1, and their error bodies."""

from megatron.extensions.openai_api.completions import add_openai_api
from megatron.extensions.openai_api.errors import openai_error

INTERFACE = add_openai_api

ERROR_BODIES = {"/v1/": openai_error}
"""Forms of errors by the beginning of a path."""
