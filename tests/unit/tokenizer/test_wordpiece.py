"""WordPiece, against the algorithm of BERT written out in Python."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import DataError
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = ["un", "##aff", "##able", "the", "##ss", "runn", "##ing", "ΟΔΟΣ", "οδος", "日", "É", "e"]
LETTERS = [chr(i) for i in range(33, 127)]
FILE = [*dict.fromkeys([*SPECIAL, *PIECES, *LETTERS, *(f"##{c}" for c in LETTERS)])]
CJK = [
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
]


def words_by_loops(text, lower_case):
    cleaned = ""
    for letter in text:
        category = unicodedata.category(letter)
        if letter in "\0\ufffd" or (category in ("Cc", "Cf") and letter not in "\t\n\r"):
            continue
        is_cjk = any(first <= ord(letter) <= last for first, last in CJK)
        is_space = letter in "\t\n\r" or category == "Zs"
        cleaned += " " if is_space else f" {letter} " if is_cjk else letter
    for word in cleaned.split():
        if lower_case:
            letters = unicodedata.normalize("NFD", word.lower())
            word = "".join(c for c in letters if unicodedata.category(c) != "Mn")
        part = ""
        for letter in word:
            is_symbol = letter.isascii() and not letter.isalnum()
            if is_symbol or unicodedata.category(letter).startswith("P"):
                yield from filter(None, (part, letter))
                part = ""
            else:
                part += letter
        if part:
            yield part


def ids_by_loops(text, lower_case):
    ids = []
    for word in words_by_loops(text, lower_case):
        pieces, start = [], 0
        while start < len(word):
            ends = range(len(word), start, -1)
            piece = next(
                (p for e in ends if (p := "##" * (start > 0) + word[start:e]) in FILE), None
            )
            if piece is None:
                break
            pieces.append(piece)
            start += len(piece) - 2 * (start > 0)
        is_known = start == len(word) and len(word) <= 200
        ids += [FILE.index(piece) for piece in pieces] if is_known else [FILE.index("[UNK]")]
    return ids


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(FILE) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizers(file):
    return {lower: WordPieceTokenizer(file, lower_case=lower) for lower in (True, False)}


ADVERSARIAL = [
    "",
    " ",
    "unaffable, UNAFFABLE running",
    "[CLS] the[SEP] <extra_id_0> [MASK]",
    "a\x00b\ufffdc\u200dd\u00ade\x1ff\tg\r\nh\xa0i\u3000j\u2028k",
    "日本x日 𠮷",
    "É E\u0301 ñ ÉCOLE İ Å ΟΔΟΣ Σ ΣΑΣ. ΑΣ-ΑΣ",
    "don't (stop) ... $1,000^2 `x`~|",
    "un" * 100 + " " + "x" * 200 + " " + "x" * 201,
    "##s the##s # ##",
    "¿qué? «ok» – “x”",
]


@pytest.mark.parametrize("lower_case", [True, False])
@pytest.mark.parametrize("text", ADVERSARIAL)
def test_ids_are_those_of_the_loops(tokenizers, text, lower_case):
    assert tokenizers[lower_case].encode(text) == ids_by_loops(text, lower_case)


OLD_LETTERS = st.text(st.characters(max_codepoint=0x2FF), max_size=8)


TEXTS = st.lists(st.sampled_from(ADVERSARIAL) | OLD_LETTERS, max_size=3).map("".join)


@given(text=TEXTS, lower=st.booleans())
@settings(max_examples=200, deadline=None)
def test_ids_of_any_text_are_those_of_the_loops(tokenizers, text, lower):
    assert tokenizers[lower].encode(text) == ids_by_loops(text, lower)


def test_a_batch_is_its_texts(tokenizers):
    tokenizer = tokenizers[True]
    assert tokenizer.encode_batch(ADVERSARIAL) == [tokenizer.encode(text) for text in ADVERSARIAL]
    with problem("surrogate pair", DataError):
        tokenizer.encode_batch(["a", "\ud83d"])


def test_roles_and_extra_ids(file):
    tokenizer = WordPieceTokenizer(file, lower_case=True, extra_ids=2)
    n = len(FILE)
    roles = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "bos": n, "eos": n + 1, "eod": 3}
    assert tokenizer.special_ids == roles
    assert (tokenizer.extra_ids, tokenizer.vocab_size) == ([n + 2, n + 3], n + 4)
    assert tokenizer.decode([2, 5, 6, 7, n + 2, 3]) == "[CLS] unaffable <extra_id_0> [SEP]"


def test_a_vocabulary_without_roles_is_an_error_when_one_is_needed(tmp_path):
    (tmp_path / "v.txt").write_text("a\r\nb")
    tokenizer = WordPieceTokenizer(tmp_path / "v.txt", lower_case=True)
    assert tokenizer.encode("a b") == [0, 1]
    with problem("mask … bos, eos … --vocab-file", DataError):
        tokenizer.special("mask")
    with problem("token for eod", DataError):
        _ = tokenizer.eod
    with problem("no tokens … 'c'", DataError):
        tokenizer.encode("c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "v.txt … no token"),
        (b"a\nb\na\n", "v.txt, line 3: 'a' … line 1"),
        (b"\xff\xfe", "--vocab-file … v.txt: … utf-8"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "v.txt").write_bytes(content)
    with problem(message, DataError):
        WordPieceTokenizer(tmp_path / "v.txt", lower_case=True)


def test_a_missing_file_is_named(tmp_path):
    with problem("--vocab-file … none", DataError):
        WordPieceTokenizer(tmp_path / "none", lower_case=True)
