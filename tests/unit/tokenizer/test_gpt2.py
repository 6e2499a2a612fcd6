"""GPT-2's tokenizer, against byte-level BPE written out in Python."""

import json
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess_spec import odd_ids
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer

WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def letters_of_bytes():
    """Return the printable letter that stands for each byte, as GPT-2 defines it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + position) for position, byte in enumerate(others)}


class BPEByLoops:
    """Merge the best-ranked pair of a word until none is left."""

    def __init__(self, vocab_file, merge_file):
        self.vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
        lines = merge_file.read_text(encoding="utf-8").split("\n")[1:-1]
        self.ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
        self.letters = letters_of_bytes()

    def encode(self, text):
        ids = []
        for word in WORDS.findall(text):
            parts = [self.letters[byte] for byte in word.encode()]
            while pairs := set(pairwise(parts)) & self.ranks.keys():
                parts = self.merge(parts, min(pairs, key=self.ranks.get))
            ids += [self.vocab[part] for part in parts]
        return ids

    @staticmethod
    def merge(parts, pair):
        merged, i = [], 0
        while i < len(parts):
            if tuple(parts[i : i + 2]) == pair:
                merged.append(parts[i] + parts[i + 1])
                i += 2
            else:
                merged.append(parts[i])
                i += 1
        return merged


@pytest.fixture(scope="module")
def tokenizer(gpt2_files):
    return GPT2BPETokenizer(*gpt2_files)


@pytest.fixture(scope="module")
def reference(gpt2_files):
    return BPEByLoops(*gpt2_files)


ADVERSARIAL = [
    "",
    " ",
    "   hello   world   ",
    "don't DON'T they'Ll 've've '",
    "a\tb\r\n\n\n c\x0b\x0c\x1c\x1f\x85\xa0\u2003\u2028\u3000d",
    "<|endoftext|>",
    "hello<|endoftext|>hello <|endoftext|>",
    "1999½Ⅷ٣²",
    "日本語日本",
    "e\u0301 \u200d\u200b\ufeff",
    "👩‍👩‍👧‍👦😀",
    "\x00\x01\x7f",
    "h" * 3000,
    "hello" * 700,
    "\U0010ffff\ue000",
]


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_ids_are_those_of_the_loops(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Letters old enough that the two regular expression libraries know the same ones.
PIECES = st.sampled_from(ADVERSARIAL[:12]) | st.text(st.characters(max_codepoint=0x2FF), max_size=8)


@given(text=st.lists(PIECES, max_size=8).map("".join))
@settings(max_examples=300, deadline=None)
def test_ids_of_any_text_are_those_of_the_loops(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_text_token_is_never_made_from_text(tokenizer):
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_vocab_size_is_the_number_of_ids(tokenizer, gpt2_files):
    assert tokenizer.vocab_size == len(json.loads(gpt2_files[0].read_text()))


def test_a_batch_is_its_texts(tokenizer):
    texts = ["hello", "", " the world"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_half_a_character_decodes_to_a_replacement(tokenizer):
    (first, *_) = tokenizer.encode("\U0010ffff")
    assert tokenizer.decode([first]) == "\ufffd"


def test_half_of_a_surrogate_pair_is_an_error(tokenizer):
    with problem("surrogate pair", DataError):
        tokenizer.encode("a\ud83d")


def test_a_bad_text_in_a_batch_is_named(tokenizer):
    with problem("'b … surrogate pair", DataError):
        tokenizer.encode_batch(["a", "b\ud83d"])


def test_an_array_is_its_texts_back_to_back(tokenizer):
    tokens, lengths = tokenizer.encode_array(texts := ["hello", "", " the world"])
    assert (tokens.dtype, lengths.dtype) == ("int32", "int64")
    assert tokens.tolist() == sum(tokenizer.encode_batch(texts), [])
    assert lengths.tolist() == [len(tokenizer.encode(text)) for text in texts]


def write_pair(tmp_path, vocab, merges):
    vocab_file, merge_file = tmp_path / "v.json", tmp_path / "m.txt"
    vocab_file.write_text(vocab if isinstance(vocab, str) else json.dumps(vocab), encoding="utf-8")
    merge_file.write_text(merges, encoding="utf-8")
    return vocab_file, merge_file


SMALL = {"a": 0, "b": 1, "ab": 2}


@pytest.mark.parametrize("merges", ["#version: 0.2\na b\n", "a b", "a b\r\n\r\n"])
def test_merges_are_read_with_and_without_version_and_last_line_end(tmp_path, merges):
    assert GPT2BPETokenizer(*write_pair(tmp_path, SMALL, merges)).encode("abab") == [2, 2]


def test_a_merge_of_number_signs_is_a_merge(tmp_path):
    files = write_pair(tmp_path, {"#": 0, "##": 1}, "#version: 0.2\n# #\n")
    assert GPT2BPETokenizer(*files).encode("##") == [1]


def test_a_byte_without_a_token_is_an_error_when_it_comes(tmp_path):
    tokenizer = GPT2BPETokenizer(*write_pair(tmp_path, SMALL, "a b\n"))
    with problem("'abc' … v.json", DataError):
        tokenizer.encode("abc")


def test_a_vocabulary_without_end_of_text_is_an_error_when_it_is_needed(tmp_path):
    tokenizer = GPT2BPETokenizer(*write_pair(tmp_path, SMALL, "a b\n"))
    with problem("v.json … eod … <|endoftext|>", DataError):
        _ = tokenizer.eod


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "", "--vocab-file … v.json … not JSON"),
        ("[]", "", "v.json … JSON object"),
        ({"a": 0, "b": 2}, "", "v.json … JSON object … ids 0, 1, 2"),
        ({"a": 0, "b": 0}, "", "v.json … JSON object … ids 0, 1, 2"),
        ({"a": [0]}, "", "v.json … JSON object … ids 0, 1, 2"),
        (SMALL, "a b\nb a\n", "--merge-file … m.txt, line 2: 'b a' … vocabulary"),
        (SMALL, "a c\n", "m.txt, line 1: 'a c' … vocabulary"),
        (SMALL, "#version: 0.2\nab\n", "m.txt, line 2: 'ab' … two tokens"),
        (SMALL, "a b 7\n", "m.txt, line 1: 'a b 7' … two tokens"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, vocab, merges, message):
    with problem(message, DataError):
        GPT2BPETokenizer(*write_pair(tmp_path, vocab, merges))


def test_merges_that_are_cut_short_are_noticed(tmp_path, gpt2_files, caplog):
    """They give other tokens, and every text has some."""
    vocab = json.loads(gpt2_files[0].read_text())
    added = {"<pad>": len(vocab), "[MASK]": len(vocab) + 1, "two words": len(vocab) + 2}
    lines = gpt2_files[1].read_text().splitlines()

    def build(num_lines):
        return GPT2BPETokenizer(
            *write_pair(tmp_path, vocab | added, "\n".join(lines[:num_lines]) + "\n")
        )

    build(len(lines))
    assert caplog.text == ""
    last = "".join(lines[-1].split(" "))
    build(len(lines) - 1)
    assert f"1 others, such as '{last}', are made by no merge and so by no text; is" in caplog.text
    tokens = ["a", "b", "ab", "aa", "aab", "bb", "bab"]
    vocab, added, lines = {token: i for i, token in enumerate(tokens)}, {}, ["a b", "a a", "b b"]
    build(2)
    with problem("m.txt … 1 tokens … cut short", DataError):
        build(1)


def test_a_missing_file_is_named(tmp_path, gpt2_files):
    with problem("--vocab-file … none … No such file", DataError):
        GPT2BPETokenizer(tmp_path / "none", gpt2_files[1])
    with problem("--merge-file … none … No such file", DataError):
        GPT2BPETokenizer(gpt2_files[0], tmp_path / "none")


def test_a_file_of_another_kind_is_named(tmp_path, gpt2_files):
    (tmp_path / "m.bin").write_bytes(b"\xff\xfe\x00")
    with problem("--merge-file … m.bin … utf-8", DataError):
        GPT2BPETokenizer(gpt2_files[0], tmp_path / "m.bin")


def test_bytes_that_are_no_character_are_odd(tokenizer, gpt2_files):
    vocab = json.loads(gpt2_files[0].read_text(encoding="utf-8"))
    letters = letters_of_bytes()
    assert odd_ids(tokenizer) == tuple(sorted(vocab[letters[byte]] for byte in range(128, 256)))
