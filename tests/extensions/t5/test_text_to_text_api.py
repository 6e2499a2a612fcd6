"""A T5 is served as its tool uses it."""

import re

import pytest
from servers import serving
from t5_engines import t5_engine, text_to_text

from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.server import ServingConfig, encoder_problems
from megatron.extensions.t5.network import T5Network
from megatron.extensions.t5.routes import text_to_text_interface
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.server.web.pages import TEXT_TO_TEXT_PAGE


@pytest.fixture(scope="module")
def t5(group, tmp_path_factory):
    return text_to_text(tmp_path_factory.mktemp("t5"), rows=3)


@pytest.fixture(scope="module")
def served_t5(group, t5):
    parts = {"interfaces": [text_to_text_interface(t5)], "page": TEXT_TO_TEXT_PAGE}
    with serving(group, engine=t5.engine, api_key="sesame", **parts) as running:
        yield running


def generate(running, **body):
    return running.send("POST", "/text-to-text", body, Authorization="Bearer sesame")


def test_texts_are_generated(served_t5, t5):
    texts, sampling = ["a <extra_id_0>", "b"], SamplingParams(temperature=2.0)
    requests = t5.requests(texts, seeds=["7:0", "7:1"], max_new_tokens=4, sampling=sampling)
    alone = t5_engine(rows=1)
    expected = [*map(t5.output, requests, alone.generate(requests))]
    body = {"texts": texts, "seed": 7, "max_new_tokens": 4, "temperature": 2.0}
    assert generate(served_t5, **body).json["results"] == [
        {"text": one.text, "filled": one.filled, "finished": one.is_finished} for one in expected
    ]
    searched = generate(served_t5, texts=["a"], beam_width=3).json["results"]
    assert len(searched) == 1 and searched[0]["filled"] is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"texts": ["a <extra_id_3>"]}, "has 3, from <extra_id_0> on"),
        ({"texts": ["a"], "max_new_tokens": 10}, "10 is more than the network's 9 positions"),
        ({"texts": ["a"], "top_k": 2, "top_p": 0.5}, "exclude each other"),
        ({"texts": ["a"], "top_k": 15}, "the vocabulary's 14 tokens"),
        ({"texts": ["a"], "beam_width": 4}, "4 is more than --micro-batch-size 3"),
        ({"texts": ["a"], "beam_width": 15}, "the vocabulary's 14 tokens"),
        ({"texts": ["a"], "beam_width": 2, "top_k": 2}, "does not go with top_k"),
        ({"texts": ["a"], "length_penalty": 2}, "is for beam_width"),
        ({"texts": ["a"] * 9}, "9 prompts are more than 8"),
    ],
)
def test_impossible_requests_to_a_t5_are_refused(served_t5, body, reason):
    reply = generate(served_t5, **body)
    assert reply.status == 400 and reason in reply.json["error"]


def test_nan_weights_are_reported_and_the_server_goes_on(group, tmp_path):
    model = text_to_text(tmp_path)
    weight = model.engine.runner.model.tied_modules["embed"].word_embeddings.weight
    parts = {"interfaces": [text_to_text_interface(model)]}
    with serving(group, engine=model.engine, **parts) as running:
        for value, status in ((float("nan"), 503), (0.1, 200)):
            weight.data.fill_(value)
            reply = running.send("POST", "/text-to-text", {"texts": ["a"]})
            assert reply.status == status
            assert status == 200 or "NaN or infinite" in reply.json["error"]


def test_keys_paths_and_metrics_are_those_of_every_server(served_t5):
    assert served_t5.send("POST", "/text-to-text", {"texts": ["a"]}).status == 401
    reply = served_t5.send("PUT", "/api", {}, Authorization="Bearer sesame")
    assert reply.status == 404 and "POST /text-to-text" in reply.json["error"]
    paths = served_t5.send("GET", "/openapi.json", Authorization="Bearer sesame").json["paths"]
    assert "/text-to-text" in paths and "/v1/completions" not in paths
    generate(served_t5, texts=["a"])
    metrics = served_t5.send("GET", "/metrics", Authorization="Bearer sesame").body.decode()
    assert 'megatron_requests_total{path="/text-to-text",status="200"}' in metrics


def test_the_page_is_served_without_a_key(served_t5):
    assert served_t5.send("GET", "/").body.decode() == TEXT_TO_TEXT_PAGE


def test_the_page_has_the_form_of_its_path():
    assert (
        'PATH = "text-to-text"' in TEXT_TO_TEXT_PAGE
        and 'data-field="beam_width"' in TEXT_TO_TEXT_PAGE
    )
    elements = set(re.findall(r'id="(\w+)"', TEXT_TO_TEXT_PAGE))
    assert set(re.findall(r'at\("(\w+)"\)', TEXT_TO_TEXT_PAGE)) <= elements


def test_flags_without_effect_are_refused():
    generation, serving_flags = GenerationConfig(recompute=True, top_k=3), ServingConfig()
    assert "--top_k" not in str([*encoder_problems(serving_flags, generation, T5Network)])
