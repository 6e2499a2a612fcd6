"""A continuation is spelled as it stands behind its prompt, blanks included."""

import pytest

from megatron.inference.loading.detokenizer import (
    Detokenizer,
    IncrementalDetokenizer,
    texts_of_each,
)
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.types.sentencepiece import LegacyLlama2Tokenizer

WORDS = "the lobster  and the tide, Größe and 日本"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("llama") / "small"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS] * 9),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
    )
    return LegacyLlama2Tokenizer(f"{prefix}.model")


def test_a_blank_at_a_continuations_beginning_stays(llama):
    tokens = llama.encode(WORDS)
    assert llama.decode(tokens) == WORDS
    spelling = Detokenizer(tokenizer=llama)
    for cut in range(1, len(tokens)):
        prompt, new = tokens[:cut], tokens[cut:]
        rest = WORDS.removeprefix(llama.decode(prompt))
        assert spelling.text(prompt, new) == rest
        parts = IncrementalDetokenizer(spelling, prompt)
        reported = [parts.add(token, is_last=i == len(new)) for i, token in enumerate(new, 1)]
        assert "".join(reported) == rest
    assert "".join(texts_of_each(llama, tokens)) == WORDS
    assert (
        "".join(texts_of_each(llama, tokens[5:], tokens[:5]))
        == WORDS[len(llama.decode(tokens[:5])) :]
    )


def test_the_first_token_of_a_text_begins_without_a_blank(llama):
    tokens = llama.encode("the tide")
    assert text_after(llama, tokens[:1], tokens[1:]) == "the tide"
    assert text_after(llama, (), tokens[1:]) == "the tide"


def test_bytes_of_one_character_are_spelled_alone_on_both_sides(llama):
    *_, first, second = llama.encode("é")
    assert llama.decode([first, second]) == "é"
    assert text_after(llama, [first], [second]) == llama.decode([second])
