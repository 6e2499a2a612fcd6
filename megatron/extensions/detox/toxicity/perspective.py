"""Client of the Perspective API: toxicity scores over HTTP, with bounded retries."""

import json
import time
from collections.abc import Callable, Sequence
from email.message import Message
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from megatron.common.errors import ConfigError, MegatronError

ATTRIBUTES = (
    *("toxicity", "severe_toxicity", "sexually_explicit"),
    *("threat", "profanity", "identity_attack"),
)
_TIMEOUT_S = 30.0
_LONGEST_WAIT_S = 60.0
_EXCERPT = 300  # characters of an answer that a message shows
_ALTERNATIVES = (
    "the API closes on 31 December 2026; other scorers: --scorer transformers, profanity-check or "
    "MODULE:NAME"
)


class ScorerUnavailableError(MegatronError):
    """The scorer fails now; another attempt continues."""


class PerspectiveAPI:
    """Scores texts with the Perspective API, one request at a time.

    Args:
        key: sent in a header, so that it is in no address and no log.
        max_retries: further requests after one that fails, such as for lack of quota.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        key: str,
        url: str,
        *,
        max_retries: int,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._key, self._url = key, url
        self._max_retries, self._sleep = max_retries, sleep

    def __call__(self, texts: Sequence[str]) -> list[dict[str, float] | None]:
        """Return the scores of each text; None if the API cannot score it.

        Raises:
            ConfigError: the key or the address is wrong.
            ScorerUnavailableError: all requests failed.
        """
        return [self._scores(text) for text in texts]

    def _scores(self, text: str) -> dict[str, float] | None:
        body = {
            "comment": {"text": text},
            "requestedAttributes": {attribute.upper(): {} for attribute in ATTRIBUTES},
            "spanAnnotations": False,
            "languages": ["en"],
        }
        problem = ""
        for attempt in range(self._max_retries + 1):
            try:
                answer = self._answer(json.dumps(body).encode())
                scores = answer["attributeScores"]
                return {a: float(scores[a.upper()]["summaryScore"]["value"]) for a in ATTRIBUTES}
            except HTTPError as error:
                content = error.read()
                if error.code == 400 and _is_about_text(content):
                    return None
                problem = f"HTTP status {error.code}: {self._excerpt(content)}"
                if error.code != 429 and error.code < 500:
                    raise ConfigError(
                        f"--scorer perspective: {self._url}: {problem} ({_ALTERNATIVES})"
                    ) from error
                wait_s = _wait_s(attempt, error.headers)
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                problem = self._excerpt(f"{type(error).__name__}: {error}".encode())
                wait_s = _wait_s(attempt, None)
            if attempt < self._max_retries:
                self._sleep(wait_s)
        raise ScorerUnavailableError(
            f"--scorer perspective: {self._url} failed {self._max_retries + 1} times, in the end "
            f"with {problem}; what was scored is kept, and the same command continues "
            f"({_ALTERNATIVES})"
        )

    def _answer(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", "X-Goog-Api-Key": self._key}
        request = Request(self._url, body, headers)
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.loads(response.read())

    def _excerpt(self, content: bytes) -> str:
        """Return the start of an answer for a message, without the key."""
        text = " ".join(content.decode("utf-8", "replace").split())
        return text.replace(self._key, "KEY")[:_EXCERPT]


def _is_about_text(content: bytes) -> bool:
    """Return whether an error is about the text, such as its language, and not about the request."""
    try:
        details = json.loads(content)["error"]["details"]
        kinds = [str(detail.get("errorType", "")) for detail in details]
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return any(kind.startswith(("COMMENT_", "LANGUAGE_")) for kind in kinds)


def _wait_s(attempt: int, headers: Message | None) -> float:
    """Return the wait after a failed request: the server's Retry-After, or 1, 2, 4 ... s."""
    demanded = headers.get("Retry-After", "") if headers else ""
    wait_s = float(demanded) if demanded.isdigit() else 2.0**attempt
    return min(wait_s, _LONGEST_WAIT_S)
