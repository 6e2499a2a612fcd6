"""A tokenizer saved by Hugging Face's libraries: a directory, or a name on the hub."""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from megatron.common.errors import DataError, WrongDataError
from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.types.options import Takes, TokenizerOptions, keywords
from megatron.tokenizer.types.tokenizer import Role, Tokenizer, Vocabulary, no_tokens, texts_by_id

log = logging.getLogger(__name__)

_LOOKUP_S = 5.0
"""Seconds that the address of the hub may take to find."""

_ROLES: tuple[Role, ...] = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class _Loaded:
    encode: Callable[[str], list[int]]
    encode_batch: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    vocab: Callable[[], Mapping[str, int]]
    vocab_size: int
    special_ids: dict[Role, int]
    extra_ids: list[int]
    backend: Backend | None  # of the `tokenizers` library; some have none


class PretrainedFromHF(Tokenizer):
    """A pretrained tokenizer; a text gets the special tokens that the tokenizer adds by itself.

    A directory with a `tokenizer.json` is read with the `tokenizers` library alone, which
    starts in a fraction of the time; anything else needs `transformers`.

    Args:
        name_or_path: a directory, or a name on the Hugging Face hub.
        extra_ids: how many tokens <extra_id_0>, <extra_id_1> and so on it has to have.
        kwargs: more arguments for `AutoTokenizer.from_pretrained`.
        adds_special_tokens: whether a text gets the tokens that the tokenizer adds by itself.

    Raises:
        DataError: there is no tokenizer at this path, or its files are damaged.
    """

    hint = "; its tokenizer_config.json or --tokenizer-kwargs names more, such as eos_token"

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        extra_ids: int = 0,
        kwargs: Mapping[str, Any] | None = None,
        adds_special_tokens: bool = True,
    ):
        self.name = str(name_or_path)
        extra = [
            AddedToken(f"<extra_id_{i}>", special=True, normalized=False) for i in range(extra_ids)
        ]
        adds = adds_special_tokens
        from_file = None if kwargs else _from_file(Path(self.name), extra, adds=adds)
        self._loaded = from_file or _from_transformers(self.name, extra, kwargs or {}, adds=adds)
        self.vocab_size = self._loaded.vocab_size
        self.special_ids = dict(self._loaded.special_ids)
        if "eos" in self.special_ids:
            self.special_ids["eod"] = self.special_ids["eos"]
        self.extra_ids = self._loaded.extra_ids
        self.backend = self._loaded.backend

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens the tokenizer adds by default."""
        try:
            return self._loaded.encode(text)
        except Exception as error:  # the libraries define no exception type
            raise no_tokens(self.name, text, error) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, found on all cores where the library does that."""
        if not texts:
            return []
        try:
            return self._loaded.encode_batch(list(texts))
        except Exception:  # of the first bad text; encode reports which one and why
            return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._loaded.decode(list(ids))

    def vocabulary(self) -> Vocabulary:
        """Return the tokens, added ones included, and the merges or scores."""
        rules = "" if self.backend is None else _rules(json.loads(self.backend.to_str())["model"])
        return Vocabulary(texts_by_id(self._loaded.vocab()), rules)


def _rules(model: Mapping[str, Any]) -> str:
    """Return the merges of BPE as GPT2BPETokenizer writes them, or the scores of Unigram."""
    if model["type"] == "BPE":
        return json.dumps([m.split(" ") if isinstance(m, str) else m for m in model["merges"]])
    return json.dumps([score for _, score in model["vocab"]]) if model["type"] == "Unigram" else ""


def _from_file(directory: Path, extra: Sequence[AddedToken], *, adds: bool) -> _Loaded | None:
    """Load tokenizer.json; None if it is missing or incomplete."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library defines no exception type
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    # Settings of the batches of some earlier use, which transformers overrides as well.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "special_tokens_map.json")
    config |= _read_json(directory / "tokenizer_config.json")
    if not _says_everything(backend, config):
        return None
    backend.add_special_tokens(list(extra))
    vocab = backend.get_vocab(with_added_tokens=True)
    return _Loaded(
        encode=lambda text: backend.encode(text, add_special_tokens=adds).ids,
        encode_batch=lambda texts: [
            row.ids for row in backend.encode_batch_fast(texts, add_special_tokens=adds)
        ],
        decode=lambda ids: backend.decode(ids, skip_special_tokens=False),
        vocab=lambda: backend.get_vocab(with_added_tokens=True),
        vocab_size=_size(vocab),
        special_ids=_special_ids(backend, config, directory),
        extra_ids=[vocab[token.content] for token in extra],
        backend=backend,
    )


def _says_everything(backend: Backend, config: dict[str, Any]) -> bool:
    """Whether transformers would change nothing of tokenizer.json because of `config`."""
    for role in _ROLES:
        token = _content(config.get(f"{role}_token"))
        if token is not None and backend.token_to_id(token) is None:
            return False
    ids = backend.encode("a").ids
    for name, index in (("bos_token", 0), ("eos_token", -1)):
        is_wanted = config.get(f"add_{name}")
        token = _content(config.get(name))
        if is_wanted is None or token is None:
            continue
        if is_wanted != (ids[index : index + 1 or None] == [backend.token_to_id(token)]):
            return False
    return True


def _special_ids(backend: Backend, config: dict[str, Any], directory: Path) -> dict[Role, int]:
    found: dict[Role, int] = {}
    for role in _ROLES:
        token = _content(config.get(f"{role}_token"))
        i = None if token is None else backend.token_to_id(token)
        if i is not None:
            found[role] = i
    if "eos" not in found and (eos := _eos_of_model(directory)) is not None:
        found["eos"] = eos
    return found


def _size(vocab: Mapping[str, int]) -> int:
    # Ids may be left out, and the last id must have its row all the same.
    return max(vocab.values(), default=-1) + 1


def _eos_of_model(directory: Path) -> int | None:
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


def _from_transformers(
    name: str, extra: Sequence[AddedToken], kwargs: Mapping[str, Any], *, adds: bool
) -> _Loaded:
    tokenizer = load_with_transformers(name, kwargs)
    tokenizer.add_tokens(list(extra), special_tokens=True)
    vocab = tokenizer.get_vocab()
    given = {"verbose": False, "add_special_tokens": adds}
    ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    return _Loaded(
        encode=lambda text: tokenizer(text, **given)["input_ids"],
        encode_batch=lambda texts: tokenizer(texts, **given)["input_ids"],
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        vocab=tokenizer.get_vocab,
        vocab_size=_size(vocab),
        special_ids={role: i for role, i in ids.items() if i is not None},
        extra_ids=[vocab[token.content] for token in extra],
        backend=getattr(tokenizer, "backend_tokenizer", None),
    )


def load_problem(error: Exception) -> str:
    """Return why transformers did not load a folder with trust_remote_code=False, as one sentence."""
    if "trust_remote_code" in str(error):
        return (
            "the folder needs Python code of its own (auto_map in its config.json or "
            "tokenizer_config.json), which is never run: give one of an architecture of transformers"
        )
    return str(error).strip().partition("\n")[0]


def _hub_has_an_address() -> bool:
    """Whether the hub can be reached: by a proxy, or its host has an address within _LOOKUP_S."""
    from huggingface_hub.constants import ENDPOINT

    if {"http", "https", "all"} & getproxies().keys():
        return True
    host = urlsplit(ENDPOINT).hostname
    found: list[object] = []

    def look_up() -> None:
        with suppress(OSError):
            found.extend(socket.getaddrinfo(host, None))

    # A thread: the system's lookup has no limit of its own.
    lookup = threading.Thread(target=look_up, daemon=True)
    lookup.start()
    lookup.join(_LOOKUP_S)
    if lookup.is_alive():
        log.warning(
            "no name server has answered for %s in %g s: only files on this machine are read",
            *(host, _LOOKUP_S),
        )
    return bool(found)


def load_with_transformers(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return transformers' tokenizer; Python code in its directory is run only if `kwargs` allow it.

    Raises:
        DataError: there is no tokenizer at this path, its files are damaged, or it needs code.
    """
    # Imported here: it takes seconds, and most tokenizers do not need it.
    from transformers import AutoTokenizer

    # Without it transformers prompts on the terminal.
    options = {"trust_remote_code": False, **kwargs}
    if not os.path.isdir(name) and not _hub_has_an_address():
        options["local_files_only"] = True  # it would try for a minute, and fill the terminal
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # of many types: files, network, missing libraries
        text = str(error).strip()
        if "trust_remote_code" in text:
            raise WrongDataError(
                f"the tokenizer --tokenizer-name-or-path {name} needs Python code of its own, which "
                "is run only with --tokenizer-kwargs trust_remote_code true (of from_hf.py: "
                "--trust-remote-code)"
            ) from error
        reason = text.partition("\n")[0].rstrip(".")
        raise DataError(
            f"cannot load the tokenizer --tokenizer-name-or-path {name}: {reason}; give a "
            "directory that holds a tokenizer or, where there is a network, a name on the hub"
        ) from error


_OF_PRETRAINED = (
    "tokenizer_kwargs",
    "vocab_extra_ids",
    "tokenizer_hf_no_include_special_tokens",
)


@TOKENIZERS.register(
    "PretrainedFromHF", about=Takes((("tokenizer_name_or_path",),), _OF_PRETRAINED, True)
)
@TOKENIZERS.register(
    "HuggingFaceTokenizer",
    about=Takes((("tokenizer_model", "tokenizer_name_or_path"),), _OF_PRETRAINED, True),
)
def _build_pretrained(options: TokenizerOptions) -> Tokenizer:
    return PretrainedFromHF(
        str(options.tokenizer_name_or_path or options.tokenizer_model),
        extra_ids=options.vocab_extra_ids,
        adds_special_tokens=not options.tokenizer_hf_no_include_special_tokens,
        kwargs=keywords(options.tokenizer_kwargs or ()),
    )
