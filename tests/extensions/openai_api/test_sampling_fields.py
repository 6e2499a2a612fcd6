"""What the fields of a request do to the tokens that are chosen."""

import pytest
from servers import EOD, SPEC, Bytes, serving
from stages import plain_logits, plainly_continued, random_model

from megatron.data.datasets.fim import FimTokens
from megatron.extensions.openai_api.completions import CompletionRequest
from megatron.extensions.openai_api.schemas import CompletionBody
from megatron.inference.engine.sampling import SamplingParams

TEXT = "The cat"


@pytest.fixture(scope="module")
def running(group):
    fim = FimTokens(prefix=1, middle=2, suffix=3, pad=4, eod=EOD, split=None)
    with serving(group, fim=fim) as running:
        yield running


@pytest.fixture(scope="module")
def most_likely(group):
    """The tokens that follow TEXT, if each is the most likely."""
    return plainly_continued(random_model(group, SPEC), SPEC, list(TEXT.encode()), 12)


def ids(running, **fields):
    """The tokens of the first choice."""
    request = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "logprobs": 0, "n": 1}
    reply = running.complete(**(request | fields), return_tokens_as_token_ids=True)
    assert reply.status == 200, reply.json
    names = reply.json["choices"][0]["logprobs"]["tokens"]
    return [int(name.removeprefix("token_id:")) for name in names]


def test_a_bias_forces_a_token_and_forbids_another(running, most_likely):
    assert ids(running)[:2] == most_likely[:2]
    assert ids(running, logit_bias={"66": 100}) == [66] * 12
    assert most_likely[0] not in ids(running, logit_bias={str(most_likely[0]): -100})


def test_every_field_reaches_the_engine(running):
    body = CompletionBody(
        model="tiny",
        prompt="a",
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias={"7": -3.0},
        stop_token_ids=[9],
        min_tokens=2,
    )
    (request,) = CompletionRequest(running.served, body).requests
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias=((7, -3.0),),
    )
    assert (request.stop_tokens, request.min_new_tokens) == ({9, EOD}, 2)


def test_top_k_and_min_p_leave_the_most_likely(running, most_likely):
    for fields in ({"top_k": 1}, {"min_p": 1}):
        assert ids(running, temperature=2, seed=1, **fields)[0] == most_likely[0]
    free = ids(running, temperature=2, seed=1)
    assert ids(running, temperature=2, seed=1, top_k=-1) == free
    assert ids(running, temperature=2, seed=1, top_k=10**30) == free


def test_draws_with_every_field_repeat_with_the_seed(running):
    fields = {
        "temperature": 1.5,
        "top_k": 50,
        "min_p": 0.001,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"97": 2},
        "min_tokens": 5,
    }
    first = ids(running, seed=7, **fields)
    assert ids(running, seed=7, **fields) == first != ids(running, seed=8, **fields)
    assert ids(running, seed=-1, **fields) != ids(running, seed=-1, **fields)


def test_stop_tokens_end_a_text(running, most_likely):
    index = next(i for i, token in enumerate(most_likely) if token not in most_likely[:i] and i > 1)
    stop = {"stop_token_ids": [most_likely[index]]}
    assert ids(running, **stop) == most_likely[: index + 1]
    choice = running.complete(prompt=TEXT, max_tokens=12, temperature=0, **stop).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == Bytes().decode(most_likely[:index])
    longer = ids(running, **stop, min_tokens=index + 2)
    assert most_likely[index] not in longer[: index + 2] and len(longer) >= index + 2


def test_the_end_of_a_document_can_be_ignored_or_put_off(running):
    bias = {"logit_bias": {str(EOD): 100}}
    assert ids(running, **bias) == [EOD]
    assert ids(running, **bias, ignore_eos=True) == [EOD] * 12
    put_off = ids(running, **bias, min_tokens=4)
    assert len(put_off) == 5 and put_off.index(EOD) == 4
    request = {"prompt": "a", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **bias}
    assert running.complete(**request).json["choices"][0]["text"] == ""
    shown = running.complete(**request, skip_special_tokens=False).json["choices"][0]
    assert shown["text"] == "<eod><eod>" and shown["finish_reason"] == "length"


def test_the_best_of_several_are_the_most_likely(running):
    request = {"prompt": ["a", "b"], "max_tokens": 4, "temperature": 3, "seed": 2, "logprobs": 0}

    def means(reply):
        lists = [choice["logprobs"]["token_logprobs"] for choice in reply.json["choices"]]
        return [sum(values) / len(values) for values in lists]

    all_of_them = running.complete(**request, n=4)
    every = means(all_of_them)
    reply = running.complete(**request, n=2, best_of=4)
    expected = [*sorted(every[:4])[:1:-1], *sorted(every[4:])[:1:-1]]
    assert means(reply) == pytest.approx(expected)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]
    assert reply.json["usage"] == all_of_them.json["usage"], "all were generated"
    plain = running.complete(**(request | {"logprobs": None}), best_of=3)
    assert plain.json["choices"][0]["logprobs"] is None


def test_a_suffix_is_what_follows_the_gap(running, group):
    tokens = [1, *b"ab", 3, *b"yz", 2]
    model = random_model(group, SPEC)
    expected = int(plain_logits(model, SPEC, tokens)[-1].argmax())
    assert ids(running, prompt="ab", suffix="yz", max_tokens=1) == [expected]
    for fields, reported in (
        ({"prompt": "a", "echo": True}, "echo cannot repeat"),
        ({"prompt": ["a", "b"]}, "the prompt must be one text"),
    ):
        refused = running.complete(suffix="z", **fields)
        assert refused.status == 400 and reported in refused.json["error"]["message"]


def test_special_tokens_of_a_prompt_can_be_left_out(running):
    assert ids(running, add_special_tokens=False) == ids(running)
