"""The lists of log-probabilities belong to the text, and the drawn token is among the most likely."""

import pytest
import torch
from servers import SPEC, Bytes, serving
from stages import plain_logits, random_model

from megatron.extensions.openai_api.choices import ChoiceBuilder, Prompt
from megatron.inference.engine.sequence import Event, TokenLogprob
from megatron.inference.loading.detokenizer import (
    Detokenizer,
    IncrementalDetokenizer,
    TokenOffsets,
    stop_prefix_length,
)

EOD = 256
WRITTEN = list("añ日b🙂c".encode())


@pytest.fixture(scope="module")
def running(group):
    with serving(group) as running:
        yield running


def test_the_offset_of_a_token_is_that_of_its_character():
    texts = TokenOffsets(Bytes())
    found = [texts.add(token) for token in WRITTEN]
    assert [offset for _, offset in found] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5]
    assert [text for text, _ in found][:2] == ["a", "\ufffd"]
    texts = TokenOffsets(Bytes(), hidden={EOD}, start=3)
    assert [texts.add(token)[1] for token in (EOD, 97, EOD, 195, 169, 98)] == [3, 3, 4, 4, 4, 5]


def test_bytes_that_are_no_character_do_not_stop_the_count():
    texts = TokenOffsets(Bytes())
    found = [texts.add(token)[1] for token in [0xFF] * 70 + [97, 98]]
    assert found == sorted(found) and found[-1] == 71


def prompt_of(text):
    return Prompt(text=text, tokens=tuple(text.encode()))


def written(stops=(), tokens=WRITTEN, prompt="é", echo=True, reason="stop"):
    """The parts of a stream whose tokens are known."""
    spelling = Detokenizer(
        tokenizer=Bytes(), stop_tokens=frozenset({EOD}), stop_strings=tuple(stops)
    )
    generator = ChoiceBuilder(
        spelling, prompt_of(prompt), echo=echo, with_tokens=True, with_stop_token=True
    )
    before = tuple(TokenLogprob(token=token, logprob=-1.0) for token in prompt.encode()[1:])
    return [
        generator.add(
            Event(
                request_id=1,
                new_token=TokenLogprob(token=token, logprob=-0.5),
                finish_reason=reason if index == len(tokens) - 1 else None,
                prompt_tokens=before if index == 0 else (),
            )
        )
        for index, token in enumerate(tokens)
    ]


def test_a_part_has_the_tokens_whose_text_begins_in_it():
    parts = written(tokens=[*WRITTEN, EOD])
    text = ""
    for part in parts:
        for record in part.tokens:
            assert len(text) <= record.offset < max(len(text + part.text), 1) or part.finish_reason
        text += part.text
    assert text == "éañ日b🙂c"
    records = [record for part in parts for record in part.tokens]
    assert [record.scored.token for record in records] == [*"é".encode(), *WRITTEN, EOD]
    assert [record.offset for record in records][-2:] == [6, 7]
    assert records[0].scored.logprob is None and records[1].scored.logprob == -1.0


@pytest.mark.parametrize(
    ("stop", "left"), [("日b", "añ"), ("🙂c", "añ日b"), ("ñ", "a"), ("a", ""), ("b🙂c", "añ日")]
)
def test_what_a_stop_string_cuts_is_not_in_the_lists(stop, left):
    parts = written([stop])
    assert "".join(part.text for part in parts) == "é" + left
    tokens = [record.scored.token for part in parts for record in part.tokens]
    assert bytes(tokens).decode() == "é" + left


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("for a st", ["stop", "st.", "t"], 2),
        ("for a st", ["xstop"], 0),
        ("aab", ["aabaaa"], 3),
        ("aabaa", ["aabaaa"], 5),
        ("abc", ["abc"], 0),
        ("", ["abc"], 0),
    ],
)
def test_only_the_beginning_of_a_stop_string_is_held_back(text, stops, held):
    assert stop_prefix_length(text, stops) == held


def test_a_stop_string_that_does_not_come_delays_nothing():
    spelling = Detokenizer(tokenizer=Bytes(), stop_strings=("b" * 200, "self."))
    parts = IncrementalDetokenizer(spelling, ())
    reported = [parts.add(token, is_last=False) for token in b"a seel x b"]
    assert reported == ["a", " ", "", "", "see", "l", " ", "x", " ", ""]


def test_stop_strings_among_the_first_tokens_are_text():
    spelling = Detokenizer(tokenizer=Bytes(), stop_strings=("b",), min_tokens=3)
    assert spelling.text((), list(b"abcabc")) == "abca"
    assert spelling.text((), list(b"ab")) == "ab"


def test_a_prompt_has_lists_of_the_most_likely_tokens_too(running, group):
    model = random_model(group, SPEC)
    text = "héllo 日本"
    request = {"prompt": text, "max_tokens": 3, "echo": True, "temperature": 0}
    choice = running.complete(**request, logprobs=2).json["choices"][0]
    reported, tokens = choice["logprobs"], list(text.encode())
    table = plain_logits(model, SPEC, tokens).log_softmax(-1)
    assert reported["top_logprobs"][0] is None and reported["token_logprobs"][0] is None
    for index, token in enumerate(tokens[1:], start=1):
        top, own = reported["top_logprobs"][index], reported["token_logprobs"][index]
        assert own == pytest.approx(float(table[index - 1, token]), abs=1e-4)
        best = table[index - 1].topk(2)
        assert len(top) == 2 + (token not in best.indices.tolist())
        assert sorted(top.values(), reverse=True)[:2] == pytest.approx(best.values, abs=1e-4)
        assert own in top.values()
    assert reported["text_offset"][: len(tokens)] == [0, 1, 1, 2, 3, 4, 5, 6, 6, 6, 7, 7, 7]
    assert reported["text_offset"][len(tokens)] == len(text)
    none = running.complete(**request, logprobs=0).json["choices"][0]["logprobs"]
    assert [len(top) for top in none["top_logprobs"][1:]] == [1] * (len(tokens) + 2)


def test_the_drawn_token_is_among_the_most_likely(running):
    request = {"prompt": "a", "max_tokens": 20, "temperature": 3, "seed": 5, "logprobs": 1}
    reported = running.complete(**request).json["choices"][0]["logprobs"]
    counts = [len(top) for top in reported["top_logprobs"]]
    assert 2 in counts and set(counts) <= {1, 2}
    for token, own, top in zip(
        reported["tokens"], reported["token_logprobs"], reported["top_logprobs"], strict=True
    ):
        assert own in top.values() and (token in top or len(top) == 2)
    by_id = running.complete(**request, return_tokens_as_token_ids=True).json["choices"][0]
    names = by_id["logprobs"]["tokens"]
    assert all(name.startswith("token_id:") for name in names)
    tops = by_id["logprobs"]["top_logprobs"]
    assert all(name in top for name, top in zip(names, tops, strict=True))


def test_the_end_of_a_document_is_in_the_lists_and_not_in_the_text(running):
    bias = {str(EOD): 100}
    request = {"prompt": "a", "max_tokens": 1, "temperature": 0, "logit_bias": bias, "echo": True}
    choice = running.complete(**request, logprobs=1).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "<eod>"]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert torch.tensor(choice["logprobs"]["token_logprobs"][1]) < 0
