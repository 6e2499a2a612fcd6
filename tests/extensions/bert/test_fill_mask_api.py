"""A BERT is served as its tool uses it."""

import re

import pytest
from browser import CHROMIUM, browser
from masked_lms import masked_lm
from servers import serving

from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.server import ServingConfig, encoder_problems
from megatron.extensions.bert.network import BertNetwork
from megatron.extensions.bert.routes import fill_mask_interface
from megatron.inference.engine.encoder_runner import SerialEngine
from megatron.inference.server.web.pages import FILL_MASK_PAGE


@pytest.fixture(scope="module")
def bert(group, tmp_path_factory):
    return masked_lm(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def served_bert(group, bert):
    parts = {"interfaces": [fill_mask_interface(bert)], "page": FILL_MASK_PAGE}
    with serving(group, engine=SerialEngine(bert.runner, bert), **parts) as running:
        yield running


def test_masks_are_filled_and_sentences_scored(served_bert, bert):
    texts = ["a [MASK] b [MASK]", "a\tc", "[mask]"]
    reply = served_bert.send("POST", "/fill-mask", {"texts": texts, "top": 2})
    assert (reply.status, reply.json["model"]) == (200, "tiny")
    filled, scored, plain = reply.json["results"]
    assert [[one["token"] for one in mask] for mask in filled["masks"]] == [
        [one.token for one in mask] for mask in bert.fill(texts[0], 2)
    ]
    assert filled["log_likelihood"] is None and filled["num_tokens"] is None
    assert (scored["log_likelihood"], scored["num_tokens"]) == bert.score(texts[1])
    assert scored["in_order"] == bert.in_order(texts[1])
    assert "[mask]" in plain["notice"] and scored["notice"] is None


def test_embeddings_are_those_of_the_network(served_bert, bert):
    reply = served_bert.send("POST", "/embeddings", {"texts": ["a b", "c"]})
    assert reply.json["embeddings"] == bert.embed(["a b", "c"]).tolist()


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/fill-mask", {"texts": ["a " * 10]}, "has 12 tokens with [CLS] and [SEP]"),
        ("/fill-mask", {"texts": ["a"] * 9}, "9 prompts are more than 8"),
        ("/fill-mask", {"texts": ["a"], "top": 0}, "top: "),
        ("/fill-mask", {"texts": []}, "texts: "),
        ("/embeddings", {"texts": ["a"], "top": 2}, "top: there is no such field"),
        ("/embeddings", {"texts": ["a", " "]}, "text 2 of 2, ' ', has no tokens"),
        ("/fill-mask", {"texts": ["a", ""]}, "text 2 of 2, '', has no tokens"),
    ],
)
def test_impossible_requests_to_a_bert_are_refused(served_bert, path, body, reason):
    reply = served_bert.send("POST", path, body)
    assert reply.status == 400 and reason in reply.json["error"]


def test_the_page_has_the_form_of_its_path():
    assert 'PATH = "fill-mask"' in FILL_MASK_PAGE and 'data-field="top"' in FILL_MASK_PAGE
    elements = set(re.findall(r'id="(\w+)"', FILL_MASK_PAGE))
    assert set(re.findall(r'at\("(\w+)"\)', FILL_MASK_PAGE)) <= elements


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at")
def test_masks_are_filled_on_the_page(served_bert, bert, tmp_path):
    with browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{served_bert.port}/")
        page.type("prompt", "a [MASK]")
        page.click("go")
        page.wait_for("document.getElementById('status').textContent.startsWith('done')")
        (best, *_), *_ = bert.fill("a [MASK]", 1)
        text = page.value("document.getElementById('text').textContent")
        assert f"mask 1: {best.token} {best.probability:.3f}" in text


def test_flags_without_effect_are_refused():
    generation, serving_flags = GenerationConfig(recompute=True, top_k=3), ServingConfig()
    assert "--recompute, --top_k" in str(
        [*encoder_problems(serving_flags, generation, BertNetwork)]
    )
    assert [*encoder_problems(serving_flags, GenerationConfig(), BertNetwork)] == []
