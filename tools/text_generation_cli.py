#!/usr/bin/env python
"""Send typed prompts to a server of tools/run_text_generation_server.py.

    python tools/text_generation_cli.py HOST:PORT

Its API key, if it needs one, is read from the file given with --api-key-file.
"""

import json
import sys
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import ToolParser, run_tool
from megatron.common.errors import DataError, MegatronError, reason

_TIMEOUT_S = 30


def main(argv: Sequence[str]) -> None:
    """Read prompts and print the server's continuations, until the input ends."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--api-key-file", type=Path)
    args = parser.parse_args(argv)
    key = read_key(args.api_key_file) if args.api_key_file else None
    require_server(args.address)
    while (prompt := read_answer("Enter prompt: ")) is not None:
        tokens = read_answer("Enter number of tokens to generate: ")
        if tokens is None:
            break
        if not tokens.strip().isdecimal():
            print(f"{tokens!r} is not a number of tokens")
            continue
        try:
            text = continue_prompt(args.address, prompt, int(tokens), key)
        except DataError as error:
            print(error)
        else:
            print(f"Megatron Response:\n{text}")
    print()


def read_key(file: Path) -> str:
    """Return the API key in `file`.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--api-key-file {file}: {reason(error, file)}") from error


def read_answer(question: str) -> str | None:
    """Return a typed line; None at the end of the input."""
    print(question, end="", flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def require_server(address: str) -> None:
    """Check that a server is reachable, whatever it answers.

    Raises:
        MegatronError: it cannot be reached.
    """
    url = f"http://{address}/health"
    try:
        urlopen(url, timeout=_TIMEOUT_S).close()
    except HTTPError as error:
        error.close()
    # ValueError: not a valid address.
    except (OSError, HTTPException, ValueError) as error:
        raise MegatronError(
            f"no answer from {url}: {getattr(error, 'reason', error)}; HOST:PORT is where "
            "tools/run_text_generation_server.py serves"
        ) from error


def continue_prompt(address: str, prompt: str, tokens: int, key: str | None) -> str:
    """Return the prompt with its continuation.

    Raises:
        DataError: the server refuses the request.
        MegatronError: it cannot be reached.
    """
    body = {"prompts": [prompt], "tokens_to_generate": tokens, "add_BOS": not prompt}
    headers: dict[str, Any] = {"Content-Type": "application/json; charset=UTF-8"}
    if key is not None:
        # As bytes: http.client encodes text as Latin-1.
        headers["Authorization"] = f"Bearer {key}".encode()
    url, data = f"http://{address}/api", json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, headers=headers, method="PUT")) as response:
            return json.load(response)["text"][0]
    except HTTPError as error:
        raise DataError(f"Error {error.code}: {error_message(error.read())}") from error
    # ValueError and KeyError: not the JSON of this server.
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise MegatronError(f"no answer from {url}: {error}") from error


def error_message(body: bytes) -> str:
    """Return the message in the body of an error."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")


if __name__ == "__main__":
    run_tool(main)
