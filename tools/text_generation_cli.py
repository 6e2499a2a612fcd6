"""Ask a server of tools/run_text_generation_server.py to continue what is typed.

    python tools/text_generation_cli.py HOST:PORT

An API key that it asks for is read from the file given with --api-key-file.
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.errors import DataError, MegatronError
from megatron.tool import run_tool


def main(argv: Sequence[str]) -> None:
    """Ask for prompts and print what the server makes of them, until the input ends."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--api-key-file", type=Path)
    said = parser.parse_args(argv)
    key = said.api_key_file.read_text(encoding="utf-8").strip() if said.api_key_file else None
    while (prompt := asked("Enter prompt: ")) is not None:
        tokens = asked("Enter number of tokens to generate: ")
        if tokens is None:
            break
        if not tokens.strip().isdigit():
            print(f"{tokens!r} is no number of tokens")
            continue
        try:
            text = continued(said.address, prompt, int(tokens), key)
        except DataError as error:
            print(error)
        else:
            print(f"Megatron Response:\n{text}")
    print()


def asked(question: str) -> str | None:
    """Return a line that is typed; None at the end of the input."""
    print(question, end="", flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def continued(address: str, prompt: str, tokens: int, key: str | None) -> str:
    """Return the prompt and what follows it.

    Raises:
        DataError: the server refuses the request.
        MegatronError: it cannot be reached.
    """
    body = {"prompts": [prompt], "tokens_to_generate": tokens, "add_BOS": not prompt}
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = Request(
        f"http://{address}/api", json.dumps(body).encode(), headers=headers, method="PUT"
    )
    try:
        with urlopen(request) as response:
            return json.load(response)["text"][0]
    except HTTPError as error:
        raise DataError(f"Error {error.code}: {reason(error.read())}") from error
    except (URLError, OSError) as error:
        raise MegatronError(f"no answer from http://{address}/api: {error}") from error


def reason(body: bytes) -> str:
    """Return what the body of a refusal says."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")


if __name__ == "__main__":
    run_tool(main)
