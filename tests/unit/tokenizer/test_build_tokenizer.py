"""From flags to a tokenizer."""

import pytest
from problems import problem
from tokenizers.processors import TemplateProcessing

from megatron.config.data.tokenizer import TokenizerConfig, tokenizer_arguments
from megatron.tokenizer.build import build_tokenizer, tokenizer_problems
from megatron.tokenizer.fingerprint import describe, differences
from megatron.tokenizer.types.fast import FastTokenizer
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.types.hugging_face import PretrainedFromHF
from megatron.tokenizer.types.options import keywords

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Un", "un", "##able", "able"]


def test_gpt2_and_pretrained_are_built_and_equal(gpt2_files, tmp_path):
    vocab_file, merge_file = map(str, gpt2_files)
    files = {"vocab_file": vocab_file, "merge_file": merge_file}
    gpt2 = build_tokenizer(tokenizer_type="GPT2BPETokenizer", **files)
    assert isinstance(gpt2, FastTokenizer)
    assert isinstance(gpt2.reference, GPT2BPETokenizer)
    gpt2.reference.backend.save(str(tmp_path / "tokenizer.json"))
    pretrained = build_tokenizer(
        tokenizer_type="PretrainedFromHF",
        tokenizer_name_or_path=str(tmp_path),
        tokenizer_backend="reference",
    )
    assert isinstance(pretrained, PretrainedFromHF)
    assert pretrained.encode("hello") == gpt2.encode("hello")
    assert differences(describe(gpt2), describe(pretrained)) == []


def test_the_tokenizer_of_hugging_face_has_megatrons_name_too(gpt2_files, tmp_path):
    GPT2BPETokenizer(*gpt2_files).backend.save(str(tmp_path / "tokenizer.json"))
    names = (
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)),
        TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(tmp_path)),
    )
    first, second = map(tokenizer_arguments, names)
    assert first == second
    assert build_tokenizer(**first).encode("hello") == build_tokenizer(**second).encode("hello")


def test_special_tokens_of_hugging_face_are_left_out(gpt2_files, tmp_path):
    backend = GPT2BPETokenizer(*gpt2_files).backend
    end = ("<|endoftext|>", backend.token_to_id("<|endoftext|>"))
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[end])
    backend.save(str(tmp_path / "tokenizer.json"))
    arguments = {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": str(tmp_path)}
    for backend_option in ("fast", "reference"):
        with_end = build_tokenizer(**arguments, tokenizer_backend=backend_option)
        bare = build_tokenizer(
            **arguments,
            tokenizer_backend=backend_option,
            tokenizer_hf_no_include_special_tokens=True,
        )
        assert with_end.encode("hello") == [end[1], *bare.encode("hello")]
        assert bare.encode_batch(["hello"]) == [bare.encode("hello")]
        assert bare.encode_array(["hello"])[0].tolist() == bare.encode("hello")


def test_word_pieces_are_built_with_and_without_case(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(WORDS))
    for name, ids in (("BertWordPieceLowerCase", [6, 7]), ("BertWordPieceCase", [5, 7])):
        tokenizer = build_tokenizer(tokenizer_type=name, vocab_file=str(file), vocab_extra_ids=2)
        assert tokenizer.encode("Unable") == ids
        assert (tokenizer.vocab_size, tokenizer.extra_ids) == (len(WORDS) + 4, [11, 12])


def test_numbers_are_built():
    assert build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=100).eod == 100


def test_keywords_are_read_by_turns():
    words = ["pad_token", "<pad>", "use_fast", "False", "model_max_length", "2048"]
    assert keywords(words) == {"pad_token": "<pad>", "use_fast": False, "model_max_length": 2048}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tokenizer_type": None},
            "--tokenizer-type … BertWordPieceLowerCase … NullTokenizer",
        ),
        ({"tokenizer_type": "Word"}, "--tokenizer-type Word: … BertWordPieceLowerCase"),
        (
            {"tokenizer_type": "SentencepieceTokenizer"},
            "--plugin MODULE … SentencePieceTokenizer?",
        ),
        ({"tokenizer_type": "SFTTokenizer"}, "SFTTokenizer: … --conversations"),
        ({"tokenizer_type": "MultimodalTokenizer"}, "MultimodalTokenizer: … HuggingFaceTokenizer"),
        ({"tokenizer_type": "NullMultimodalTokenizer"}, "NullMultimodalTokenizer: … NullTokenizer"),
        ({"tokenizer_type": "HFTokenizer"}, "HFTokenizer: … HuggingFaceTokenizer"),
        (
            {"tokenizer_type": "HuggingFaceTokenizer"},
            "HuggingFaceTokenizer … --tokenizer-model … --tokenizer-name-or-path",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v.json"},
            "GPT2BPETokenizer … --merge-file missing",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "merge_file": "m.txt"},
            "GPT2BPETokenizer … --vocab-file missing",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer"},
            "--vocab-file and --merge-file missing",
        ),
        (
            {"tokenizer_type": "PretrainedFromHF", "vocab_file": "v.json"},
            "PretrainedFromHF … --tokenizer-name-or-path missing",
        ),
        (
            {"tokenizer_type": "TikTokenizer"},
            "TikTokenizer … --tokenizer-model or --vocab-file missing",
        ),
        (
            {"tokenizer_type": "TikTokenizer", "vocab_file": "v", "tokenizer_model": "m"},
            "--tokenizer-model and --vocab-file … one",
        ),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "PieceTokenizer … --tokenizer-model"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "Llama2Tokenizer … --tokenizer-model"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer … --vocab-size missing"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": -1}, "--vocab-size -1 … 1"),
        ({"tokenizer_type": "BertWordPieceCase"}, "BertWordPieceCase … --vocab-file"),
        (
            {"tokenizer_type": "BertWordPieceCase", "vocab_file": "v", "vocab_extra_ids": -1},
            "--vocab-extra-ids -1 … 0",
        ),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "vocab_extra_ids": 1},
            "--vocab-extra-ids … --tokenizer-type NullTokenizer",
        ),
        (
            {"tokenizer_type": "PretrainedFromHF", "tokenizer_kwargs": ["pad_token"]},
            "--tokenizer-kwargs pad_token: ",
        ),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "tokenizer_backend": "fast"},
            "--tokenizer-backend fast: … GPT2BPETokenizer",
        ),
    ],
)
def test_missing_flags_are_named(options, message):
    with problem(message):
        build_tokenizer(**options)


def test_all_mistakes_are_reported_at_once():
    options = {"merge_file": "m", "tokenizer_model": "t", "tokenizer_type": "NullTokenizer"}
    assert len([*tokenizer_problems(**options)]) == 3
