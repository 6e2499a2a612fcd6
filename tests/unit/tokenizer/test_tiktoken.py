"""Files of ranks, against byte-level BPE of the reference and tiktoken's own encodings."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import ConfigError, DataError
from megatron.data.preprocessing.preprocess_spec import odd_ids
from megatron.tokenizer.types.adversarial import adversarial_texts
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.types.tiktoken import PATTERNS, TikTokenizer

tiktoken = pytest.importorskip("tiktoken")


def letters():
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


@pytest.fixture(scope="module")
def tokens(gpt2_files):
    """Return the tokens as bytes: those of one byte, and then the merges in order."""
    byte_of = letters()
    merges = gpt2_files[1].read_text(encoding="utf-8").split("\n")[1:-1]
    words = [bytes(byte_of[c] for c in line.replace(" ", "")) for line in merges]
    return [*(bytes([i]) for i in range(256)), *words]


def write_lines(path, tokens):
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_json(path, tokens):
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory, tokens):
    return TikTokenizer(write_lines(tmp_path_factory.mktemp("t") / "r50k_base.tiktoken", tokens))


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return GPT2BPETokenizer(*gpt2_files)


def texts_of(tokenizer, ids):
    return [tokenizer.decode([i]) for i in ids]


def test_words_are_cut_and_merged_as_by_gpt2(published, gpt2):
    for text in adversarial_texts(["<|endoftext|>"]):
        ids = published.encode(text)
        assert texts_of(published, ids) == texts_of(gpt2, gpt2.encode(text))
        assert published.decode(ids) == text


@given(text=st.text(st.characters(max_codepoint=0x2FF)))
@settings(max_examples=200, deadline=None)
def test_any_text_is_cut_and_merged_as_by_gpt2(published, gpt2, text):
    assert texts_of(published, published.encode(text)) == texts_of(gpt2, gpt2.encode(text))


def test_a_published_name_brings_its_special_tokens(published):
    assert published.special_ids == {"eos": 50256, "eod": 50256}
    assert published.vocab_size == 50257
    assert published.decode([published.eod]) == "<|endoftext|>"
    assert 50256 not in published.encode("<|endoftext|>")
    with problem("pad … --tiktoken-special-tokens", DataError):
        published.special("pad")


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_published_encodings_are_those_of_the_library(name, tokens, tmp_path, monkeypatch):
    from tiktoken_ext import openai_public

    ranks = {token: i for i, token in enumerate(tokens)}
    for download in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, download, lambda *_, **__: ranks)
    written = getattr(openai_public, name)()
    written.pop("explicit_n_vocab", None)
    theirs = tiktoken.Encoding(**written)
    ours = TikTokenizer(write_lines(tmp_path / f"{name}.tiktoken", tokens))
    for text in adversarial_texts():
        assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.eod == theirs.eot_token
    assert ours.vocab_size == theirs.max_token_value + 1


def test_special_tokens_of_another_file_follow_its_last_id(tokens, tmp_path):
    file = write_lines(tmp_path / "own.tiktoken", tokens)
    ours = TikTokenizer(file, pattern="cl100k", special_tokens=["<s>", "</s>", "<pad>"])
    n = len(tokens)
    assert ours.special_ids == {"bos": n, "eos": n + 1, "eod": n + 1, "pad": n + 2}
    assert ours.vocab_size == n + 3


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_a_json_file_has_its_special_tokens_first(tokens, tmp_path, pattern):
    file = write_json(tmp_path / "v.json", tokens)
    ours = TikTokenizer(file, pattern=pattern, vocab_size=270, num_special_tokens=10)
    assert ours.special_ids == {"unk": 0, "bos": 1, "eos": 2, "eod": 2}
    assert (ours.vocab_size, ours.encode("!")) == (270, [10 + ord("!")])
    assert ours.vocabulary().tokens[:4] == ["<unk>", "<s>", "</s>", "<SPECIAL_3>"]
    theirs = tiktoken.Encoding(
        "x",
        pat_str=PATTERNS[pattern],
        mergeable_ranks={token: 10 + i for i, token in enumerate(tokens[:260])},
        special_tokens={},
    )
    for text in adversarial_texts(["</s>"]):
        assert ours.encode(text) == theirs.encode_ordinary(text)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pattern": None}, ConfigError, "--tiktoken-pattern … v.json"),
        ({"vocab_size": 500}, DataError, "--vocab-size 500 … 10"),
        ({"num_special_tokens": 2}, ConfigError, "--tiktoken-num-special-tokens 2 … 3"),
        ({"special_tokens": ["<s>"]}, ConfigError, "--tiktoken-special-tokens … <unk> </s>"),
        (
            {"special_tokens": ["<s>", "<s>"]},
            ConfigError,
            "--tiktoken-special-tokens <s> <s> … once",
        ),
    ],
)
def test_options_that_do_not_fit_are_reported(tokens, tmp_path, options, error, message):
    file = write_json(tmp_path / "v.json", tokens)
    written = {"pattern": "v1", "vocab_size": 270, "num_special_tokens": 10} | options
    with problem(message, error):
        TikTokenizer(file, **written)


def test_options_for_json_files_are_refused_elsewhere(tokens, tmp_path):
    file = write_lines(tmp_path / "own.tiktoken", tokens)
    with problem("--tiktoken-num-special-tokens … .json … own.tiktoken"):
        TikTokenizer(file, pattern="v1", vocab_size=300)
    with problem("--tiktoken-pattern … own.tiktoken"):
        TikTokenizer(file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.json", "{", "v.json … JSON list … rank"),
        ("v.json", '[{"rank": 1, "token_bytes": "IQ=="}]', "v.json … JSON list … rank"),
        ("v.json", '[{"rank": 0, "token_bytes": "?"}]', "v.json … JSON list … rank"),
        ("v.json", "[1]", "v.json … JSON list … rank"),
        ("v.json", "[]", "v.json … JSON list … rank"),
        ("v.tiktoken", "IQ== 0\nIg==\n", "v.tiktoken, line 2: b'Ig==' … base64"),
        ("v.tiktoken", "? 0\n", "v.tiktoken, line 1"),
        ("v.tiktoken", "IQ== 0\nIg== 0\n", "v.tiktoken … one id a line"),
        ("v.tiktoken", "", "v.tiktoken … one id a line"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with problem(message, DataError):
        TikTokenizer(tmp_path / name, pattern="v1")


def test_a_missing_file_is_named(tmp_path):
    with problem("TikTokenizer … none: No such file", DataError):
        TikTokenizer(tmp_path / "none", pattern="v1")


def test_a_missing_library_is_named(tokens, tmp_path, modules):
    file = write_lines(tmp_path / "own.tiktoken", tokens)
    modules("tiktoken")
    with problem("pip install tiktoken"):
        TikTokenizer(file, pattern="v1")


def test_half_of_a_surrogate_pair_is_an_error(published):
    with problem("surrogate pair", DataError):
        published.encode("a\ud83d")


def test_bytes_that_are_no_character_are_odd(published):
    assert odd_ids(published) == tuple(range(128, 256))
