"""SentencePiece models, against the library itself and Megatron-LM's rules written out."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import DataError
from megatron.config.data.tokenizer import TokenizerConfig, tokenizer_arguments
from megatron.tokenizer.build import build_tokenizer, tokenizer_for
from megatron.tokenizer.fingerprint import describe, differences, record_path, require_same, to_text
from megatron.tokenizer.types.sentencepiece import (
    LegacyLlama2Tokenizer,
    LegacySentencePieceTokenizer,
)

sentencepiece = pytest.importorskip("sentencepiece")

TEXTS = [
    "",
    " ",
    "the lobster and the tide",
    "a<EOD>b <SEP> c<extra_id_1>",
    "<s>x</s> <unk> <pad>",
    "日本 😀 e\u0301\x00\r\n\tz",
    "x" * 500,
]


def train(folder, name, **options):
    words = ["the", "lobster", "and", "tide", "Größe", "hello", "world", "日本"]
    lines = [f"{a} {b} {c}" for a in words for b in words for c in words[:3]]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / name),
        vocab_size=330,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return folder / f"{name}.model"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    return {
        "plain": train(folder, "plain", model_type="bpe"),
        "named": train(folder, "named", pad_id=3, user_defined_symbols=["<SEP>"]),
        "bare": train(folder, "bare", bos_id=-1, eos_id=-1),
    }


@pytest.fixture(scope="module")
def model(files):
    return sentencepiece.SentencePieceProcessor(model_file=str(files["plain"]))


def by_loops(model, tokenizer, text):
    """Take the special token that comes first, again and again."""
    special = {tokenizer.vocabulary().tokens[i]: i for i in special_ids(tokenizer)}
    positions = {text.find(token): token for token in special if token in text}
    if not positions:
        return model.encode(text)
    position, token = min(positions.items())
    rest = by_loops(model, tokenizer, text[position + len(token) :])
    return [*model.encode(text[:position]), special[token], *rest]


def special_ids(tokenizer):
    ids = {role: i for role, i in tokenizer.special_ids.items() if role != "unk"}
    return [*ids.values(), *tokenizer.extra_ids]


@given(text=st.lists(st.sampled_from(TEXTS) | st.text(max_size=6)).map("".join))
@settings(max_examples=100, deadline=None)
def test_ids_are_those_of_the_loops(model, files, text):
    tokenizer = LegacySentencePieceTokenizer(files["plain"], extra_ids=2)
    assert tokenizer.encode(text) == by_loops(model, tokenizer, text)
    assert LegacyLlama2Tokenizer(files["plain"]).encode(text) == [
        model.bos_id(),
        *model.encode(text),
    ]


def test_special_tokens_follow_the_model(model, files):
    n, tokenizer = len(model), LegacySentencePieceTokenizer(files["plain"], extra_ids=2)
    added = {"cls": n, "sep": n + 1, "eod": n + 2, "mask": n + 3, "pad": n + 4}
    assert tokenizer.special_ids == {"unk": 0, "bos": 1, "eos": 2, **added}
    assert (tokenizer.extra_ids, tokenizer.vocab_size) == ([n + 5, n + 6], n + 7)
    assert tokenizer.decode(tokenizer.encode("the tide<EOD>and")) == "the tide <EOD> and"


def test_special_tokens_of_the_model_are_used(files):
    model = sentencepiece.SentencePieceProcessor(model_file=str(files["named"]))
    tokenizer = LegacySentencePieceTokenizer(files["named"])
    assert tokenizer.special("pad") == 3
    assert tokenizer.special("sep") == model.piece_to_id("<SEP>") < len(model)
    assert tokenizer.vocab_size == len(model) + 3


def test_llama_ends_documents_with_eos(files):
    tokenizer = LegacyLlama2Tokenizer(files["plain"])
    assert (tokenizer.eod, tokenizer.special("bos")) == (2, 1)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    with problem("token for pad", DataError):
        tokenizer.special("pad")


def test_a_model_without_bos_is_no_llama(files):
    tokenizer = LegacyLlama2Tokenizer(files["bare"])
    with problem("token for bos", DataError):
        tokenizer.encode("a")
    with problem("token for eod", DataError):
        _ = tokenizer.eod
    assert LegacySentencePieceTokenizer(files["bare"]).special("bos") == tokenizer.vocab_size + 5


def test_models_are_distinguished(files):
    plain, named = (
        describe(LegacySentencePieceTokenizer(files[name])) for name in ("plain", "named")
    )
    assert differences(plain, plain) == []
    assert "tokens differ" in " ".join(differences(plain, named))


def test_half_of_a_surrogate_pair_is_an_error(files):
    with problem("surrogate pair", DataError):
        LegacySentencePieceTokenizer(files["plain"]).encode("a\ud83d")


def test_a_bad_file_is_named(tmp_path):
    with problem("--tokenizer-model … none … No such file", DataError):
        LegacySentencePieceTokenizer(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"no model")
    with problem("--tokenizer-model … bad: … SentencePiece", DataError):
        LegacyLlama2Tokenizer(tmp_path / "bad")


def test_a_missing_library_is_named(files, modules):
    modules("sentencepiece")
    with problem("pip install sentencepiece"):
        LegacySentencePieceTokenizer(files["plain"])


def built(kind, file, **more):
    return build_tokenizer(tokenizer_type=kind, tokenizer_model=str(file), **more)


@given(text=st.lists(st.sampled_from(TEXTS) | st.text(max_size=6)).map("".join))
@settings(max_examples=50, deadline=None)
def test_without_the_legacy_flag_ids_are_those_of_the_library(model, files, text):
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        tokenizer = built(kind, files["plain"])
        assert tokenizer.encode(text) == model.encode_as_ids(text)


def test_without_the_legacy_flag_nothing_is_added_and_eos_ends_a_document(model, files):
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        tokenizer = built(kind, files["plain"])
        assert (tokenizer.vocab_size, tokenizer.eod) == (len(model), model.eos_id())
        assert "cls" not in tokenizer.special_ids
        assert tokenizer.decode(tokenizer.encode("the tide")) == "the tide"


def test_the_legacy_flag_is_megatrons_older_form(model, files):
    legacy = {"tokenizer_sentencepiece_legacy": True}
    adding = built("SentencePieceTokenizer", files["plain"], vocab_extra_ids=1, **legacy)
    assert adding.eod == len(model) + 2
    llama = built("Llama2Tokenizer", files["plain"], **legacy)
    assert llama.encode("the") == [model.bos_id(), *model.encode("the")]
    gpt = built("GPTSentencePieceTokenizer", files["plain"], **legacy)
    assert gpt.encode("the") == model.encode("the")


def test_extra_tokens_need_the_legacy_flag(files):
    with problem("--vocab-extra-ids … --tokenizer-sentencepiece-legacy"):
        built("SentencePieceTokenizer", files["plain"], vocab_extra_ids=1)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_two_forms_do_not_mix(files, tmp_path, kind, is_recorded):
    """Records without the flag are older than the flag, so of legacy tokens."""

    def made(is_legacy):
        config = TokenizerConfig(
            tokenizer_type=kind,
            tokenizer_model=str(files["plain"]),
            tokenizer_sentencepiece_legacy=is_legacy,
        )
        arguments = tokenizer_arguments(config)
        return describe(build_tokenizer(**arguments), arguments)

    legacy, now = made(True), made(False)
    if not is_recorded:
        older = {k: v for k, v in legacy.arguments.items() if "legacy" not in k}
        legacy = dataclasses.replace(legacy, arguments=older)
    record_path(tmp_path / "old").write_text(to_text(legacy))
    record_path(tmp_path / "new").write_text(to_text(now))
    require_same(tmp_path / "old", made(True))
    require_same(tmp_path / "new", made(False))
    with problem("write --tokenizer-sentencepiece-legacy", DataError):
        require_same(tmp_path / "old", now)
    with problem("leave --tokenizer-sentencepiece-legacy out", DataError):
        require_same(tmp_path / "new", made(True))
    again, line = tokenizer_for(str(tmp_path / "old"), None)
    assert again.encode("the tide") == built(
        kind, files["plain"], tokenizer_sentencepiece_legacy=True
    ).encode("the tide")
    assert line.endswith("as recorded")
