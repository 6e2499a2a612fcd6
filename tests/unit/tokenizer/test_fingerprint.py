"""Records of which tokenizer made the data."""

import json
from dataclasses import replace

import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.tokenizer.fingerprint import (
    describe,
    differences,
    fingerprint,
    read_record,
    record_path,
    require_same,
    to_text,
)
from megatron.tokenizer.types.fast import FastTokenizer
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.null import NullTokenizer
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return GPT2BPETokenizer(*gpt2_files)


def changed(gpt2_files, folder, *, vocab=lambda v: v, merges=lambda m: m):
    files = folder / "other.json", folder / "other.txt"
    files[0].write_text(json.dumps(vocab(json.loads(gpt2_files[0].read_text()))))
    files[1].write_text("\n".join(merges(gpt2_files[1].read_text().split("\n"))))
    return GPT2BPETokenizer(*files)


def swap(vocab, one, two):
    return vocab | {one: vocab[two], two: vocab[one]}


def test_file_names_and_backends_do_not_count(gpt2, gpt2_files, tmp_path):
    copy = changed(gpt2_files, tmp_path)
    assert copy.name != gpt2.name
    assert fingerprint(copy) == fingerprint(gpt2) == fingerprint(FastTokenizer(gpt2))
    assert differences(describe(copy), describe(gpt2)) == []


def test_the_fingerprint_is_the_same_for_ever():
    # A changed value would make every record that exists one of another tokenizer.
    assert fingerprint(NullTokenizer(9)) == (
        "a9d752ab5e2aa9d6f53ea5fb336c1574443f7371e2635f9037ad4475c9486aeb"
    )


def test_the_same_tokens_from_other_files_are_no_difference(gpt2, tmp_path):
    gpt2.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}'
    )
    record = describe(PretrainedFromHF(tmp_path))
    assert record.fingerprint != fingerprint(gpt2)
    assert differences(describe(gpt2), record) == differences(record, describe(gpt2)) == []


def test_differing_tokens_are_named(gpt2, gpt2_files, tmp_path):
    other = changed(gpt2_files, tmp_path, vocab=lambda v: swap(v, "a", "b"))
    then, now = (gpt2.encode(text)[0] for text in "ab")
    (found,) = differences(describe(gpt2), describe(other))
    assert found == (
        f"2 tokens differ: id {then} was 'a' and is 'b' now, id {now} was 'b' and is 'a' now"
    )


def test_many_differing_tokens_are_counted(gpt2):
    found = differences(describe(gpt2), describe(NullTokenizer(5)))
    assert found[0] == f"vocabulary of {gpt2.vocab_size} tokens, and 6 now"
    assert found[1].startswith(f"{gpt2.vocab_size} tokens differ: id 0 was '<|endoftext|>' and is")
    assert found[1].endswith("and is missing now, and so on")
    assert found[2] == "eod was 0 and is 5 now"


def test_other_merges_are_a_difference(gpt2, gpt2_files, tmp_path):
    other = changed(gpt2_files, tmp_path, merges=lambda m: [m[0], m[2], m[1], *m[3:]])
    assert differences(describe(gpt2), describe(other)) == [
        "the same tokens, joined by other merges or scores"
    ]


def test_another_end_of_document_is_a_difference(gpt2, tmp_path):
    record = describe(gpt2)
    other = describe(gpt2)
    object.__setattr__(other, "special", {"eod": 5})
    object.__setattr__(other, "fingerprint", "other")
    assert differences(record, other) == ["eod was 0 and is 5 now"]


def test_case_is_a_difference(tmp_path):
    (tmp_path / "v.txt").write_text("[UNK]\na\nA")
    lower, cased = (WordPieceTokenizer(tmp_path / "v.txt", lower_case=x) for x in (True, False))
    assert len(differences(describe(lower), describe(cased))) == 1


def test_sentinels_behind_the_other_tokens_are_no_difference(tmp_path):
    (tmp_path / "v.txt").write_text("[UNK]\na\nb")
    (tmp_path / "w.txt").write_text("[UNK]\na\nc")
    plain, many = (
        describe(WordPieceTokenizer(tmp_path / "v.txt", lower_case=True, extra_ids=count))
        for count in (0, 100)
    )
    other = describe(WordPieceTokenizer(tmp_path / "w.txt", lower_case=True, extra_ids=100))
    assert differences(plain, many) == differences(many, plain) == []
    assert differences(plain, other) == ["1 tokens differ: id 2 was 'b' and is 'c' now"]


def test_words_cut_in_another_way_are_a_difference(gpt2, tmp_path):
    from tokenizers import Tokenizer, pre_tokenizers

    backend = Tokenizer.from_str(gpt2.backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert differences(describe(gpt2), describe(PretrainedFromHF(tmp_path))) == [
        "the same tokens, but texts are cut into words in another way"
    ]


def test_a_record_is_read_as_it_was_written(gpt2, tmp_path):
    prefix = tmp_path / "data.v1_text_document"
    record_path(prefix).write_text(to_text(describe(gpt2)))
    assert [path.name for path in tmp_path.iterdir()] == ["data.v1_text_document.tokenizer.json"]
    assert read_record(prefix) == describe(gpt2)
    require_same(prefix, describe(gpt2))


def test_data_without_a_record_pass(gpt2, tmp_path):
    assert read_record(tmp_path / "data") is None
    require_same(tmp_path / "data", describe(gpt2))


def test_data_of_another_tokenizer_are_an_error(gpt2, tmp_path):
    record_path(tmp_path / "data").write_text(to_text(describe(gpt2)))
    message = "data.bin … another tokenizer … vocab.json … NullTokenizer"
    with problem(message, DataError):
        require_same(tmp_path / "data", describe(NullTokenizer(5)))


def test_the_message_has_both_types_short_tokens_and_the_flags_of_the_data(gpt2, tmp_path):
    files = {"vocab_file": "/x/vocab.json", "merge_file": "/x/merges.txt"}
    made_by = describe(gpt2, {"tokenizer_type": "GPT2BPETokenizer"} | files)
    record_path(tmp_path / "data").write_text(to_text(made_by))
    now = describe(NullTokenizer(5), {"tokenizer_type": "NullTokenizer", "vocab_size": 5})
    now = replace(now, name="digits.json", tokens=["{" * 11_000])
    words = "(GPT2BPETokenizer … vocab.json) … run (NullTokenizer digits.json)"
    with problem(words, DataError) as it:
        require_same(tmp_path / "data", now)
    assert f"is '{'{' * 19}…' now, " in str(it.value)
    assert str(it.value).endswith(
        "; for these data write --tokenizer-type GPT2BPETokenizer --vocab-file /x/vocab.json "
        "--merge-file /x/merges.txt"
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[:50], "not JSON"),
        (lambda text: "[]", "record … format 1"),
        (
            lambda text: text.replace('"format": 1', '"format": 2'),
            "record … format 1 … another version",
        ),
        (lambda text: text.replace('"special"', '"special_"'), "record … format 1"),
        (lambda text: text.replace('"eod": 0', '"eod": 1'), "damaged"),
    ],
)
def test_a_damaged_record_is_an_error(gpt2, tmp_path, edit, message):
    record_path(tmp_path / "data").write_text(to_text(describe(gpt2)))
    path = tmp_path / "data.tokenizer.json"
    path.write_text(edit(path.read_text()))
    with problem(f"data.tokenizer.json … {message}", DataError):
        read_record(tmp_path / "data")


def test_a_record_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "data.tokenizer.json").mkdir()
    with problem("data.tokenizer.json: Is a directory", DataError):
        read_record(tmp_path / "data")
