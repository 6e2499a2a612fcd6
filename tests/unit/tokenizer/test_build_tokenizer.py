"""From flags to a tokenizer."""

import pytest

from megatron.errors import ConfigError
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.hugging_face import PretrainedFromHF


def test_each_type_is_built(gpt2_files, tmp_path):
    vocab_file, merge_file = map(str, gpt2_files)
    gpt2 = build_tokenizer(
        tokenizer_type="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file
    )
    assert isinstance(gpt2, GPT2BPETokenizer)
    gpt2._backend.save(str(tmp_path / "tokenizer.json"))
    pretrained = build_tokenizer(
        tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(tmp_path)
    )
    assert isinstance(pretrained, PretrainedFromHF)
    assert pretrained.encode("hello") == gpt2.encode("hello")


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"tokenizer_type": None}, "--tokenizer-type is missing: give GPT2BPETokenizer or Pre"),
        ({"tokenizer_type": "Word"}, "--tokenizer-type Word: give GPT2BPETokenizer or Pretrained"),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v.json"},
            "GPT2BPETokenizer needs --vocab-file and --merge-file; --merge-file missing",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "merge_file": "m.txt"},
            "GPT2BPETokenizer needs --vocab-file and --merge-file; --vocab-file missing",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer"},
            "--vocab-file and --merge-file missing",
        ),
        (
            {"tokenizer_type": "PretrainedFromHF", "vocab_file": "v.json"},
            "PretrainedFromHF needs --tokenizer-name-or-path; --tokenizer-name-or-path missing",
        ),
    ],
)
def test_missing_flags_are_named(wishes, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(**wishes)
