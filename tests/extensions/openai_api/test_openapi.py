"""The OpenAPI document is what the server does: schemathesis tries requests that it derives from it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from servers import serving

from megatron.tokenizer.chat import ChatTemplate

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def running(group):
    with serving(group, chat=ChatTemplate(TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def document(running):
    return running.send("GET", "/openapi.json").json


@pytest.fixture(scope="module")
def schema(running):
    schema = schemathesis.openapi.from_asgi("/openapi.json", running.server.config.app)
    # A body that is larger than allowed is refused before it is read.
    schema.config.checks.negative_data_rejection.expected_statuses.append("413")
    return schema


OPERATIONS = [
    ("/api", "PUT"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
]


def test_every_path_is_tried(document):
    described = [(path, one.upper()) for path, at in document["paths"].items() for one in at]
    assert sorted(described) == sorted(OPERATIONS)


TRIED = [
    *((path, method, GenerationMode.POSITIVE) for path, method in OPERATIONS),
    *((path, method, GenerationMode.NEGATIVE) for path, method in OPERATIONS if method != "GET"),
]


@pytest.mark.parametrize(("path", "method", "mode"), TRIED)
def test_every_answer_is_one_that_the_document_describes(schema, path, method, mode):
    @settings(max_examples=20, deadline=None, suppress_health_check=[*HealthCheck])
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def answers(case):
        if mode is GenerationMode.POSITIVE and method == "POST":
            case.body["model"] = "tiny"
        # Limits that several fields have together, and those of the model, stand in no schema.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    answers()


def test_statuses_are_documented(document):
    def statuses(path, method):
        return set(document["paths"][path][method]["responses"])

    body = {"200", "400", "401", "408", "413", "503"}
    assert statuses("/api", "put") == body
    assert statuses("/v1/completions", "post") == body | {"404"}
    assert statuses("/v1/chat/completions", "post") == body | {"404"}
    assert statuses("/v1/models/{model}", "get") == {"200", "401", "404"}
    assert statuses("/health", "get") == {"200", "503"}
    metrics = document["paths"]["/metrics"]["get"]["responses"]["200"]
    assert [*metrics["content"]] == ["text/plain"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_optional_fields_may_be_null(document):
    schemas = document["components"]["schemas"]
    for name in ("CompletionBody", "ChatBody", "MegatronBody"):
        required = schemas[name]["required"]
        for field, one in schemas[name]["properties"].items():
            kinds = [one, *one.get("anyOf", [])]
            may_be_null = any(kind.get("type") == "null" for kind in kinds)
            assert may_be_null == (field not in required), (name, field)
