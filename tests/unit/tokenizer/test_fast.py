"""The fast backend gives the ids of the reference, or is not used."""

import json
import logging
import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from megatron.common.errors import ConfigError, DataError
from megatron.tokenizer.types.adversarial import adversarial_texts
from megatron.tokenizer.types.fast import (
    SEPARATOR,
    FastEncoder,
    FastTokenizer,
    WordEncoder,
    difference,
    load_fast,
)
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.null import NullTokenizer

gigatoken = pytest.importorskip("gigatoken")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def byte_level(**keywords):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | keywords)


def after(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, byte_level(use_regex=False)])


KINDS = {
    "gpt2": lambda backend: None,
    "prefix space": lambda b: setattr(b, "pre_tokenizer", byte_level(add_prefix_space=True)),
    "nfc": lambda backend: setattr(backend, "normalizer", normalizers.NFC()),
    "llama3": lambda backend: setattr(backend, "pre_tokenizer", after(LLAMA3)),
    "bloom": lambda backend: setattr(backend, "pre_tokenizer", after(BLOOM)),
    "bos and eos": lambda backend: setattr(
        backend,
        "post_processor",
        processors.TemplateProcessing(
            single="<s> $A <s> </s>", special_tokens=[("<s>", 330), ("</s>", 331)]
        ),
    ),
}


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return GPT2BPETokenizer(*gpt2_files)


@pytest.fixture(scope="module")
def make(gpt2, tmp_path_factory):
    """Return a function that saves a tokenizer of Hugging Face after an edit, and loads it."""

    def made(edit, extra=0):
        backend = Tokenizer.from_str(gpt2.backend.to_str())
        backend.add_special_tokens(["<s>", "</s>"])
        backend.add_tokens(["lobster"])
        edit(backend)
        folder = tmp_path_factory.mktemp("kind")
        backend.save(str(folder / "tokenizer.json"))
        return PretrainedFromHF(folder, extra_ids=extra)

    return made


PIECES = ["<|endoftext|>", "<s>", "</s>", "lobster", " lobster", "\r\n", "\x00", "é", "e\u0301"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=6)).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, make):
    reference = make(KINDS[request.param])
    return reference, FastTokenizer(reference, must_be_fast=True)


@given(texts=st.lists(TEXTS))
@settings(max_examples=150, deadline=None)
def test_ids_are_those_of_the_reference(pair, texts):
    reference, fast = pair
    expected = [reference.encode(text) for text in texts]
    assert fast.encode_batch(texts) == expected
    tokens, lengths = fast.encode_array(texts)
    assert (tokens.dtype, lengths.dtype) == (np.int32, np.int64)
    assert tokens.tolist() == sum(expected, [])
    assert lengths.tolist() == [len(ids) for ids in expected]


@given(texts=st.lists(TEXTS))
@settings(max_examples=50, deadline=None)
def test_ended_ids_are_those_of_the_reference_with_an_end(pair, texts):
    reference, fast = pair
    tokens, lengths = fast.encode_ended(texts, 7)
    assert (tokens.dtype, lengths.dtype) == (np.int32, np.int64)
    assert tokens.tolist() == sum(([*reference.encode(text), 7] for text in texts), [])
    assert lengths.tolist() == [len(reference.encode(text)) + 1 for text in texts]


SEPARATOR_TEXTS = ["a", f"b {SEPARATOR}c", SEPARATOR[:-1], ""]


def test_a_text_with_what_stands_between_texts_is_left_to_the_reference(gpt2):
    encoder, fast = load_fast(gpt2), FastTokenizer(gpt2, must_be_fast=True)
    for encoder.joins in (True, False):
        with problem("text holds", ValueError):
            encoder.encode_array(SEPARATOR_TEXTS)
    expected = [gpt2.encode(text) for text in SEPARATOR_TEXTS]
    assert [fast.encode(text) for text in SEPARATOR_TEXTS] == expected
    assert fast.encode_array(SEPARATOR_TEXTS)[0].tolist() == sum(expected, [])
    ended = fast.encode_ended(SEPARATOR_TEXTS, 7)[0].tolist()
    assert ended == sum(([*ids, 7] for ids in expected), [])


def test_texts_are_given_as_a_list_where_joining_them_gives_other_ids(gpt2, monkeypatch):
    joined = FastEncoder._join
    monkeypatch.setattr(
        FastEncoder, "_join", lambda self, texts: joined(self, [f"{text} " for text in texts])
    )
    fast = FastTokenizer(gpt2, must_be_fast=True)
    assert not load_fast(gpt2).joins
    assert fast.encode_array(["a b", "c"])[0].tolist() == gpt2.encode("a b") + gpt2.encode("c")


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_what_gives_a_text_back_is_what_the_reference_decodes_to_it(pair, text):
    reference, fast = pair
    ids = np.array(reference.encode(text), np.int32)
    for one in (ids, ids[1:], ids.astype("<u2")):
        assert fast.gives_back(one, text) == (reference.decode(one.tolist()) == text)


def test_another_way_to_decode_is_left_to_the_reference(make):
    def two_spaces_as_one(backend):
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("  ", " ")])

    fast = FastTokenizer(make(two_spaces_as_one), must_be_fast=True)
    for text, expected in (("a b", True), ("a  b", False)):
        assert fast.gives_back(fast.encode_array([text])[0], text) == expected


def test_every_character_has_the_ids_of_the_reference(gpt2):
    fast = FastTokenizer(gpt2, must_be_fast=True)
    letters = [chr(i) for i in range(0, 0x110000, 7) if not 0xD800 <= i <= 0xDFFF]
    texts = ["".join(f"a{c}1 {c}" for c in letters[i : i + 50]) for i in range(0, len(letters), 50)]
    assert fast.encode_array(texts)[0].tolist() == gpt2.encode_array(texts)[0].tolist()


def test_a_long_run_without_spaces_is_encoded(gpt2):
    fast = FastTokenizer(gpt2, must_be_fast=True)
    for text in ("ab" * 500_000, " " * 1_000_000):
        (ids,) = fast.encode_batch([text])
        assert fast.decode(ids) == text


def test_all_that_is_known_of_it_is_of_the_reference(make):
    reference = make(KINDS["gpt2"], extra=2)
    fast = FastTokenizer(reference)
    for name in ("name", "vocab_size", "special_ids", "extra_ids", "hint"):
        assert getattr(fast, name) == getattr(reference, name)
    assert fast.vocabulary() == reference.vocabulary()
    assert fast.encode("<extra_id_1>") == [fast.extra_ids[1]]
    assert fast.is_fast


def test_the_vocabulary_of_the_files_alone_needs_no_fast_library(gpt2, modules, caplog):
    modules("gigatoken")
    with caplog.at_level(logging.INFO, logger="megatron"):
        fast = FastTokenizer(gpt2)
        assert (fast.vocab_size, fast.eod) == (gpt2.vocab_size, gpt2.eod)
        assert not caplog.text
        assert fast.encode("a") == gpt2.encode("a")
    assert "gigatoken" in caplog.text


OTHERS = {
    "almost bloom": (
        lambda backend: setattr(backend, "pre_tokenizer", after(BLOOM.replace("!", ""))),
        "gigatoken cannot",
    ),
    "other words": (
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Whitespace()),
        "gigatoken cannot read it: Unsupported pre_tokenizer",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_it_cannot_read_is_left_to_the_reference(make, caplog, kind):
    edit, reason = OTHERS[kind]
    reference = make(edit)
    fast = FastTokenizer(reference)
    with caplog.at_level(logging.INFO, logger="megatron"):
        assert fast.encode_batch(TEXTS_OF_BATCH) == reference.encode_batch(TEXTS_OF_BATCH)
    assert caplog.text.count("the slower reference encodes, because " + reason) == 1
    assert not fast.is_fast
    assert fast.encode("a b") == reference.encode("a b")
    assert fast.encode_array(["a b"])[0].tolist() == reference.encode("a b")
    with problem(f"--tokenizer-backend fast: {reason}"):
        FastTokenizer(reference, must_be_fast=True)


def test_words_of_bloom_are_looked_up_however_many_there_are(make):
    reference = make(KINDS["bloom"])
    assert isinstance(load_fast(reference), WordEncoder)
    fast = WordEncoder(reference.backend, most_pieces=3)
    assert difference(reference, fast) is None
    for text in ("a b c", "don't (stop), now", "a b c", "x  y \x1c.\x85"):
        assert fast.encode(text) == reference.encode(text)
        assert len(fast._ids) < 1000


TEXTS_OF_BATCH = ["hello world", "", "the lobster"]


def spoiled(encode, text, change):
    """Return an `encode_array` that gets one text wrong."""

    def wrong(self, texts):
        tokens, lengths = encode(self, texts)
        if text in texts:
            tokens = tokens.copy()
            end = int(lengths[: list(texts).index(text) + 1].sum())
            tokens[end - 1] += change
        return tokens, lengths

    return wrong


@pytest.mark.parametrize("text", ["\n\u3000x", adversarial_texts()[-1], "ab" * 350])
def test_one_other_id_is_found(gpt2, monkeypatch, caplog, text):
    wrong = spoiled(FastEncoder.encode_array, text, 1)
    monkeypatch.setattr(FastEncoder, "encode_array", wrong)
    fast = FastTokenizer(gpt2)
    with caplog.at_level(logging.INFO, logger="megatron"):
        assert fast.encode_array([text])[0].tolist() == gpt2.encode(text)
    assert "because gigatoken gives other ids: of " in caplog.text
    with pytest.raises(ConfigError, match=r"gigatoken .*, id \d+ is \[\d+\]"):
        FastTokenizer(gpt2, must_be_fast=True)


def test_other_merges_are_found(gpt2):
    other = json.loads(gpt2.backend.to_str())
    other["model"]["merges"].pop()
    found = difference(gpt2, FastEncoder(json.dumps(other)))
    assert found.startswith("gigatoken gives other ids: of ")


def test_a_vocabulary_without_all_bytes_is_left_to_the_reference(tmp_path):
    (tmp_path / "v.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "m.txt").write_text("a b\n")
    fast = FastTokenizer(GPT2BPETokenizer(tmp_path / "v.json", tmp_path / "m.txt"))
    assert fast.encode("abab") == [2, 2]
    assert not fast.is_fast
    with problem("bytes … token", DataError):
        fast.encode("c")


def test_a_tokenizer_of_another_library_is_left_to_itself():
    assert load_fast(NullTokenizer(5)) == "it is not a tokenizer of the tokenizers library"


def test_a_missing_library_is_named(gpt2, modules):
    modules("gigatoken")
    assert not FastTokenizer(gpt2).is_fast
    with problem("pip install gigatoken"):
        FastTokenizer(gpt2, must_be_fast=True)


def test_half_of_a_surrogate_pair_is_the_error_of_the_reference(gpt2):
    fast = FastTokenizer(gpt2, must_be_fast=True)
    with problem("'a … surrogate pair", DataError):
        fast.encode("a\ud83d")
    with problem("'b … surrogate pair", DataError):
        fast.encode_array(["a", "b\ud83d"])


def test_no_texts_are_no_tokens(gpt2):
    tokens, lengths = FastTokenizer(gpt2).encode_array([])
    assert (tokens.size, lengths.size) == (0, 0)


def test_adversarial_texts_hold_what_they_promise():
    texts = adversarial_texts(["<|x|>"])
    full = "".join(texts)
    assert texts == adversarial_texts(["<|x|>"])
    assert {ord(letter) >> 16 for letter in full} == set(range(17))
    assert all(piece in full for piece in ("\r\n", "\x00", "\u200d", "\u0301", "<|x|>", "a" * 500))
    assert not any("\ud800" <= letter <= "\udfff" for letter in full)


def encode_in_child(folder, queue):
    queue.put(FastTokenizer(PretrainedFromHF(folder)).encode_array(["hello"])[0].tolist())


def test_a_forked_process_encodes_after_its_parent_did(make):
    reference = make(KINDS["gpt2"])
    expected = FastTokenizer(reference).encode_array(["hello"])[0].tolist()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=encode_in_child, args=(reference.name, queue))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join()
