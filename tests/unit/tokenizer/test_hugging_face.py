"""Tokenizers of Hugging Face, against transformers reading the same directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from problems import problem
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megatron.common.errors import DataError
from megatron.tokenizer.types.hugging_face import PretrainedFromHF

TEXTS = ["", "hello world", "a</s>b <s>", "日本 😀", "x " * 50]


@pytest.fixture
def directory(tmp_path):
    """Return a directory whose tokenizer puts <s> before every text; its ids are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["hello"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(8)
    backend.enable_padding(length=6, pad_token="</s>", pad_id=1)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", CONFIG)
    return tmp_path


CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
}


def write(directory, name, content):
    (directory / name).write_text(json.dumps(content))


def assert_equals_transformers(directory):
    from transformers import AutoTokenizer

    ours, theirs = PretrainedFromHF(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.encode_batch(TEXTS) == [theirs.encode(text) for text in TEXTS]
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)
    return ours


def test_a_directory_is_what_transformers_makes_of_it(directory):
    ours = assert_equals_transformers(directory)
    assert (ours.vocab_size, ours.eod) == (2 + 256 + 1, 1)
    assert ours.encode("hello")[0] == 0
    assert ours.decode(ours.encode("hello w")) == "<s>hello w"


@pytest.mark.parametrize(
    "edit",
    [
        {"pad_token": "<pad>"},
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True},
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False},
    ],
)
def test_a_config_that_asks_for_more_than_the_file_has_is_honoured(directory, edit):
    write(directory, "tokenizer_config.json", CONFIG | edit)
    assert_equals_transformers(directory)


def test_a_directory_with_a_tokenizer_file_needs_no_transformers(directory):
    program = (
        "import sys; from megatron.tokenizer.types.hugging_face import PretrainedFromHF; "
        "PretrainedFromHF(sys.argv[1]).encode('a'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program, str(directory)], check=True, cwd=root)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [1, [1, 0]])
def test_the_model_config_names_the_end_when_the_tokenizer_does_not(directory, name, value):
    write(directory, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    write(directory, name, {"eos_token_id": value})
    assert PretrainedFromHF(directory).eod == 1


def test_the_special_tokens_map_names_the_end(directory):
    (directory / "tokenizer_config.json").unlink()
    write(directory, "special_tokens_map.json", {"eos_token": "</s>"})
    assert PretrainedFromHF(directory).eod == 1


def test_no_end_is_an_error_only_when_it_is_needed(directory):
    (directory / "tokenizer_config.json").unlink()
    tokenizer = PretrainedFromHF(directory)
    assert tokenizer.encode("a")[0] == 0
    with problem("eod … tokenizer_config.json", DataError):
        _ = tokenizer.eod


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", "tokenizer.json … not a tokenizer"),
        ("tokenizer_config.json", "tokenizer_config.json … JSON"),
    ],
)
def test_a_damaged_file_is_named(directory, name, message):
    (directory / name).write_text("{")
    with problem(message, DataError):
        PretrainedFromHF(directory)


def test_a_text_that_is_no_text_is_an_error(directory):
    with problem("no tokens for", DataError):
        PretrainedFromHF(directory).encode("a\ud83d")


def test_a_folder_without_a_tokenizer_is_one_clear_message(tmp_path):
    with problem("--tokenizer-name-or-path … directory", DataError):
        PretrainedFromHF(tmp_path)


def test_special_tokens_are_found_by_role(directory):
    named = CONFIG | {"pad_token": "</s>", "mask_token": "hello"}
    write(directory, "tokenizer_config.json", named)
    ours = PretrainedFromHF(directory)
    assert ours.special_ids == {"bos": 0, "eos": 1, "eod": 1, "pad": 1, "mask": 258}
    assert ours.special("mask") == 258
    with problem("cls … bos", DataError):
        ours.special("cls")


@pytest.mark.parametrize("kwargs", [{}, {"pad_token": "</s>"}])
def test_extra_ids_come_after_the_vocabulary(directory, kwargs):
    ours = PretrainedFromHF(directory, extra_ids=2, kwargs=kwargs)
    assert (ours.vocab_size, ours.extra_ids) == (261, [259, 260])
    assert ours.encode("a<extra_id_1>b")[2] == 260
    assert ours.vocabulary().tokens[260] == "<extra_id_1>"
    assert ours.special_ids.get("pad") == (1 if kwargs else None)


def test_keywords_reach_transformers(directory):
    assert PretrainedFromHF(directory, kwargs={"eos_token": "<s>"}).eod == 0
    assert PretrainedFromHF(directory, kwargs={"eos_token": "<s>"}).encode_batch([]) == []


def test_the_last_id_counts_when_ids_are_left_out(directory):
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 300
    write(directory, "tokenizer.json", content)
    ours = PretrainedFromHF(directory)
    assert ours.encode("a") == [0, 300]
    assert ours.vocab_size == 301
    assert ours.vocabulary().tokens[299:] == ["", "a"]
