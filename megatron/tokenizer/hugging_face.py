"""A tokenizer saved by Hugging Face's libraries: a directory, or a name on the hub."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from megatron.errors import DataError

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True)
class _Loaded:
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    eos_id: int | None


class PretrainedFromHF:
    """A pretrained tokenizer; a text gets the special tokens that the tokenizer adds by itself.

    A directory with a `tokenizer.json` is read with the `tokenizers` library alone, which
    starts in a fraction of the time; anything else needs `transformers`.

    Args:
        name_or_path: a directory, or a name on the Hugging Face hub.

    Raises:
        DataError: there is no tokenizer at this place, or its files are damaged.
    """

    def __init__(self, name_or_path: str | Path):
        self._name = str(name_or_path)
        self._loaded = _from_file(Path(self._name)) or _from_transformers(self._name)
        self.vocab_size = self._loaded.vocab_size

    @property
    def eod(self) -> int:
        """Id of the end-of-sequence token."""
        if self._loaded.eos_id is None:
            raise DataError(
                f"the tokenizer {self._name} has no eos_token to end documents with; "
                "name one in its tokenizer_config.json"
            )
        return self._loaded.eos_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens the tokenizer adds by default."""
        try:
            return self._loaded.encode(text)
        except Exception as error:  # the libraries have no exception of their own
            raise DataError(f"{self._name}: no tokens for {text[:80]!r}: {error}") from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._loaded.decode(list(ids))


def _from_file(directory: Path) -> _Loaded | None:
    """Load tokenizer.json; None if it is not there, or does not say everything."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library has no exception of its own
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    # Settings of the batches of some earlier use, which transformers overrides as well.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "special_tokens_map.json")
    config |= _read_json(directory / "tokenizer_config.json")
    if not _says_everything(backend, config):
        return None
    return _Loaded(
        encode=lambda text: backend.encode(text).ids,
        decode=lambda ids: backend.decode(ids, skip_special_tokens=False),
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        eos_id=_eos_id(backend, config, directory),
    )


def _says_everything(backend: Backend, config: dict[str, Any]) -> bool:
    """Whether transformers would change nothing of tokenizer.json because of `config`."""
    for role in _ROLES:
        token = _content(config.get(role))
        if token is not None and backend.token_to_id(token) is None:
            return False
    ids = backend.encode("a").ids
    for role, place in (("bos_token", 0), ("eos_token", -1)):
        is_wanted = config.get(f"add_{role}")
        token = _content(config.get(role))
        if is_wanted is None or token is None:
            continue
        if is_wanted != (ids[place : place + 1 or None] == [backend.token_to_id(token)]):
            return False
    return True


def _eos_id(backend: Backend, config: dict[str, Any], directory: Path) -> int | None:
    token = _content(config.get("eos_token"))
    if token is not None:
        return backend.token_to_id(token)
    for name in ("generation_config.json", "config.json"):
        found = _read_json(directory / name).get("eos_token_id")
        if isinstance(found, list) and found:
            found = found[0]
        if isinstance(found, int):
            return found
    return None


def _content(token: Any) -> str | None:
    """Return the text of a token, which is a string or an object with details."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error


def _from_transformers(name: str) -> _Loaded:
    # Imported here: it takes seconds, and most tokenizers do not need it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many types: files, network, missing libraries
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"cannot load the tokenizer --tokenizer-name-or-path {name}: {reason}; give a "
            "directory that holds a tokenizer or, where there is a network, a name on the hub"
        ) from error
    return _Loaded(
        encode=lambda text: tokenizer(text, verbose=False)["input_ids"],
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
    )
