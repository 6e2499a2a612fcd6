"""What a preparation says before it begins."""

import json

from megatron.data.preprocessing.command import read_flags

WARNING = "warning: BertWordPieceCase without --split-sentences: each document is one sequence"


def test_a_tokenizer_of_bert_wants_sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    flags = ["--input", "corpus.jsonl", "--output-prefix", "out"]
    bert = [*flags, "--tokenizer-type", "BertWordPieceCase", "--vocab-file", "vocab.txt"]
    numbers = [*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    (warning,) = read_flags(bert, description="").notices
    assert warning.startswith(WARNING)
    assert read_flags([*bert, "--split-sentences"], description="").notices == ()
    assert read_flags(numbers, description="").notices == ()
