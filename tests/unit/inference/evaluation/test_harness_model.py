"""What lm_eval asks is answered as by plain loops over transformers' own model."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from problems import problem
from untrained import LENGTH, WRITTEN, log_probabilities

from megatron.common.errors import DataError
from megatron.config.inference.generation import GenerationConfig
from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
from megatron.inference.loading.loaded_model import load_model
from megatron.inference.loading.model_source import read_model_source

IS_THERE = find_spec("lm_eval") is not None
"""The package itself; without it, something to inherit from stands in for it."""


@dataclass
class Request:
    """A request, as far as a model looks at it."""

    args: tuple


@pytest.fixture(scope="module")
def model(theirs):
    loaded = load_model(
        read_model_source(["--load", str(theirs[0])], {}, description=None),
        GenerationConfig(),
        rows=3,
    )
    evaluator = DistributedEvaluator(loaded.engine.runner, rows=3, tokenizer=loaded.tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        if not IS_THERE:
            for name in ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model"):
                patch.setitem(sys.modules, name, ModuleType(name))
            sys.modules["lm_eval.api.instance"].Instance = Request
            sys.modules["lm_eval.api.model"].LM = type("LM", (), {})
        from megatron.inference.evaluation.lm_eval_harness import HarnessModel

        yield HarnessModel(evaluator, loaded.tokenizer, length=LENGTH, seed=1)
    if not IS_THERE:
        del sys.modules["megatron.inference.evaluation.lm_eval_harness"]


def plain_score(network, tokens, first):
    """Return the log-probability of the tokens from `first` on, and whether all are most likely."""
    total, most_likely = 0.0, True
    for index in range(first, len(tokens)):
        found = log_probabilities(network, tokens[:index])
        total += found[tokens[index]].item()
        most_likely &= int(found.argmax()) == tokens[index]
    return total, most_likely


def test_continuations(model, theirs):
    _, network, tokenizer = theirs
    words = WRITTEN.split()
    pairs = [(" ".join(words[:n]), f" {' '.join(words[n : n + 2])}") for n in range(1, 12)]
    pairs += [("in the ", "war"), ("", "in the"), ("  ", "war")]
    context = tokenizer.encode("in the")
    most_likely = tokenizer.decode([int(log_probabilities(network, context).argmax())])
    pairs.append(("in the", most_likely))
    expected = []
    for before, after in pairs:
        context = tokenizer.encode(before.rstrip()) or [tokenizer.eos_token_id]
        full = tokenizer.encode(before + after)
        target = full[len(context) :] if before.strip() else full
        tokens = [*context, *target][-LENGTH - 1 :]
        expected.append(plain_score(network, tokens, len(tokens) - len(target)))
    found = model.loglikelihood([Request(pair) for pair in pairs])
    assert [total for total, _ in found] == pytest.approx(
        [total for total, _ in expected], abs=1e-4
    )
    assert [is_greedy for _, is_greedy in found] == [yes for _, yes in expected]
    assert expected[-1][1]
    with problem("continuation … tokens … --seq-length 12", DataError):
        model.loglikelihood([Request(("a", WRITTEN))])


def test_whole_texts(model, theirs):
    _, network, tokenizer = theirs
    texts = [WRITTEN, "in the war", "", WRITTEN[:40]]
    expected = []
    for text in texts:
        tokens = [tokenizer.eos_token_id, *tokenizer.encode(text)]
        total = 0.0
        for first in range(1, len(tokens), LENGTH):
            part = tokens[: first + LENGTH][-LENGTH - 1 :]
            num_scored = len(tokens[first : first + LENGTH])
            total += plain_score(network, part, len(part) - num_scored)[0]
        expected.append(total)
    found = model.loglikelihood_rolling([Request((text,)) for text in texts])
    assert found == pytest.approx(expected, abs=1e-3)


def test_answers(model, theirs):
    _, network, tokenizer = theirs

    def generated(context, most, stop):
        tokens = (tokenizer.encode(context) or [tokenizer.eos_token_id])[-(LENGTH - most) :]
        new = network.generate(
            torch.tensor([tokens]), max_new_tokens=most, do_sample=False, pad_token_id=0
        )[0, len(tokens) :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        return text[: text.index(stop)] if stop and stop in text else text

    contexts = ["in the", "The game began in 2010, and the valley's folk began", "valley", ""]
    full = [generated(context, 5, None) for context in contexts]
    assert all(full)
    stop = full[0][2:4]
    request = [Request((context, {"until": [stop], "max_gen_toks": 5})) for context in contexts]
    assert model.generate_until(request) == [generated(context, 5, stop) for context in contexts]
    request = [Request((contexts[0], {"until": "\n\n", "max_new_tokens": 3, "temperature": 0}))]
    assert model.generate_until(request) == [generated(contexts[0], 3, None)]
    drawn = [
        Request((context, {"do_sample": True, "top_k": -1, "max_tokens": 5}))
        for context in contexts
    ]
    assert model.generate_until(drawn) == model.generate_until(drawn) != full
    assert model.generate_until([]) == []


def test_answers_that_a_sequence_has_no_room_for_are_warned_of(model, caplog):
    model.generate_until([Request(("a", {"until": "b", "max_gen_toks": LENGTH - 1}))])
    assert "new tokens" not in caplog.text
    model.generate_until([Request(("a", {"until": "b", "max_gen_toks": 10 * LENGTH}))])
    assert f"1 of 1 requests ask for up to {10 * LENGTH} new tokens" in caplog.text


@pytest.mark.parametrize(("until", "answer"), [(" <6>", "<5>"), (" <5>", ""), ("!", "<5> <6>")])
def test_an_answer_begins_without_the_blank_that_its_tokens_lose_alone(model, until, answer):
    tokenizer = SimpleNamespace(
        encode=lambda text: [len(text)],
        decode=lambda ids: " ".join(f"<{i}>" for i in ids),
        special_ids={"eod": 0},
        eod=0,
    )
    evaluator = SimpleNamespace(completions=lambda _: [SimpleNamespace(tokens=(5, 6))])
    asks = type(model)(evaluator, tokenizer, length=LENGTH, seed=1)
    assert asks.generate_until([Request(("of", {"until": until, "max_gen_toks": 2}))]) == [answer]


def test_a_token_that_begins_texts_is_not_judged(model, theirs, monkeypatch):
    _, network, tokenizer = theirs
    begin = tokenizer.encode("!")
    monkeypatch.setattr(
        model,
        "tokenizer",
        SimpleNamespace(encode=lambda text: begin + tokenizer.encode(text), eod=0),
    )
    words = tokenizer.encode("in the war")
    expected = plain_score(network, begin + words, 1)
    ((total, is_greedy),) = model.loglikelihood([Request(("", "in the war"))])
    assert (total, is_greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    (total,) = model.loglikelihood_rolling([Request(("in the war",))])
    assert total == pytest.approx(expected[0], abs=1e-4)
