"""Rows for one or two texts: those of BERT equal Megatron's."""

import numpy as np
import pytest

from megatron.extensions.tasks.data.packing import (
    DecoderPacker,
    EncodedTexts,
    SegmentPacker,
    clean_text,
)
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer


@pytest.mark.parametrize(
    ("first", "second", "length", "ids", "types"),
    [
        ([5, 6, 7], [8, 9], 10, "2 5 6 7 3 8 9 3 0 0", "0 0 0 0 0 1 1 1 0 0"),
        ([5, 6, 7], [*range(8, 13)], 10, "2 5 6 7 3 8 9 10 11 3", "0 0 0 0 0 1 1 1 1 1"),
        ([5, 6, 7], [8, 9, 10], 9, "2 5 6 7 3 8 9 10 3", "0 0 0 0 0 1 1 1 1"),
        ([*range(5, 20)], [30, 31], 10, "2 5 6 7 8 9 10 11 12 3", "0 0 0 0 0 0 0 0 0 1"),
        ([5, 6, 7], None, 8, "2 5 6 7 3 0 0 0", "0 0 0 0 0 0 0 0"),
        ([5, 6, 7], None, 5, "2 5 6 7 3", "0 0 0 0 0"),
        ([5, 6, 7, 8], None, 6, "2 5 6 7 8 3", "0 0 0 0 0 0"),
        ([5, 6, 7, 8], None, 5, "2 5 6 7 3", "0 0 0 0 0"),
        ([], [], 4, "2 3 3 0", "0 0 1 0"),
    ],
)
def test_rows_are_packed_as_megatron_packs_them(first, second, length, ids, types):
    row = SegmentPacker(length, cls=2, sep=3, pad=0).pack(first, second)
    assert " ".join(map(str, row["text"])) == ids
    assert " ".join(map(str, row["types"])) == types
    num_tokens = len(ids.rstrip(" 0").split())
    assert row["padding_mask"].tolist() == [1] * num_tokens + [0] * (length - num_tokens)
    assert {array.dtype.name for array in row.values()} == {"int64"}


@pytest.mark.parametrize(
    ("first", "second", "length", "ids"),
    [
        ([5, 6, 7], None, 5, "1 5 6 7 0"),
        ([5, 6, 7], [8, 9], 8, "1 5 6 7 2 8 9 0"),
        ([5, 6, 7], [8, 9], 7, "1 5 6 7 2 8 9"),
        ([5, 6, 7], [8, 9], 6, "1 5 6 7 2 8"),
        ([5, 6, 7], None, 3, "1 5 6"),
    ],
)
def test_rows_of_a_gpt_end_with_the_text(first, second, length, ids):
    packer = DecoderPacker(length, front=(1,), eod=2, pad=0)
    row = packer.pack(first, second)
    assert " ".join(map(str, row["text"])) == ids
    assert row["padding_mask"].sum() == len(ids.rstrip(" 0").split())
    assert not row["types"].any()


@pytest.mark.parametrize(
    "packer",
    [SegmentPacker(9, cls=2, sep=3, pad=0), DecoderPacker(9, front=(1,), eod=2, pad=0)],
)
def test_rows_that_lose_tokens_are_recognized(packer):
    for second in (None, [1], [1] * 4):
        for count in range(1, 12):
            tokens = count + len(second or ())
            row = packer.pack([5] * count, second)
            kept = int(np.isin(row["text"][1:], [1, 5]).sum())  # behind [CLS] or the beginning
            assert packer.is_cut(tokens, is_pair=second is not None) == (kept < tokens)


def test_types_are_padded_with_0_whatever_the_padding_token():
    row = SegmentPacker(6, cls=2, sep=3, pad=9).pack([5], [6])
    assert row["text"].tolist() == [2, 5, 3, 6, 3, 9]
    assert row["types"].tolist() == [0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a\nb  c . d", "a b c. d"),
        ("x . y . z . w . v", "x. y. z. w. v"),
        (" lead . trail ", " lead. trail "),
        ("tab\tnbsp\u00a0end . ", "tab nbsp end. "),
        (" . . . ", ". .. "),
    ],
)
def test_text_is_cleaned_as_megatron_cleans_it(text, clean):
    assert clean_text(text) == clean


class WithSpecialTokens(WordPieceTokenizer):
    """Encodes as tokenizers of transformers do: [CLS] text."""

    def encode(self, text):
        return [self.special("cls"), *super().encode(text)]


@pytest.mark.parametrize("kind", [WordPieceTokenizer, WithSpecialTokens])
def test_texts_are_encoded_without_special_tokens(tmp_path, kind):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"]))
    texts = EncodedTexts(["a b", "", "b"], kind(tmp_path / "vocab.txt", lower_case=True))
    assert [texts[i].tolist() for i in range(len(texts))] == [[4, 5], [], [5]]
