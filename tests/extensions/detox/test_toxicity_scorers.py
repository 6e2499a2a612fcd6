"""Toxicity scorers but for the Perspective API."""

import pytest
import torch
from problems import problem, require_problem
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from megatron.extensions.detox.flags import ScorerConfig, scorer_problems
from megatron.extensions.detox.toxicity.scorers import ScorerFactory

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
TEXTS = ["a b c", "c", "b " * 40]


def scorer(name, **options):
    return ScorerFactory(ScorerConfig(scorer=name, **options))()


@pytest.fixture
def functions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "SHARES = {'a': 0.1, 'b': 1, 'c': None}\n"
        "def shares(texts): return (SHARES[text] for text in texts)\n"
        "def named(texts): return [{'toxicity': 0.5, 'threat': 0.25} for _ in texts]\n"
        "def few(texts): return []\n"
        "def large(texts): return [1.5 for _ in texts]\n"
        "def nan(texts): return [float('nan') for _ in texts]\n"
        "def unnamed(texts): return [{'threat': 0.5} for _ in texts]\n"
    )
    return lambda name: f"{file}:{name}"


def test_a_function_scores(functions, monkeypatch, tmp_path):
    assert scorer(functions("shares"))(["a", "b", "c"]) == [
        {"toxicity": 0.1},
        {"toxicity": 1.0},
        None,
    ]
    monkeypatch.syspath_prepend(tmp_path)
    assert scorer("mine:named")(["a"]) == [{"toxicity": 0.5, "threat": 0.25}]


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("few", "0 scores … 1 texts"),
        ("large", "1.5 for a text"),
        ("nan", "nan for a text"),
        ("unnamed", "{'threat': 0.5} … key toxicity"),
        ("shares", "KeyError: 'd'"),
        ("none", "no function none"),
        ("SHARES", "no function SHARES"),
    ],
)
def test_a_function_that_does_not_score_is_reported(functions, name, reported):
    with problem(reported):
        scorer(functions(name))(["d"])


def test_a_missing_module_or_file_is_reported(tmp_path):
    with problem("no_such_module … ModuleNotFoundError"):
        scorer("no_such_module:f")
    with problem("no file … none.py"):
        scorer(f"{tmp_path}/none.py:f")


def test_profanity_check_scores_or_names_its_package(modules):
    modules("profanity_check")
    with problem("pip install alt-profanity-check"):
        scorer("profanity-check")
    tenths = lambda texts: torch.tensor([len(text) / 10 for text in texts]).numpy()  # noqa: E731
    modules("profanity_check", predict_prob=tenths)
    (scores,) = scorer("profanity-check")(["abcde"])
    assert scores == {"toxicity": 0.5}


def classifier(folder, labels, problem_type):
    """Write an untrained classifier; return its network."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        initializer_range=1.0,
        id2label=dict(enumerate(labels)),
        problem_type=problem_type,
    )
    network = BertForSequenceClassification(config).eval()
    network.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return network


def logits_of(network, text):
    words = text.split()[: 16 - 2]
    ids = [WORDS.index(word) for word in ("[CLS]", *words, "[SEP]")]
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize(
    ("labels", "problem_type", "toxic", "probabilities"),
    [
        (["neutral", "Toxic"], None, None, lambda logits: logits.softmax(-1)),
        (["threat", "toxicity", "insult"], "multi_label_classification", None, torch.sigmoid),
        (["LABEL_0", "LABEL_1"], None, "LABEL_1", lambda logits: logits.softmax(-1)),
        (["toxic"], None, None, torch.sigmoid),
    ],
)
def test_a_transformers_classifier_scores(tmp_path, labels, problem_type, toxic, probabilities):
    network = classifier(tmp_path, labels, problem_type)
    found = scorer("transformers", scorer_model=str(tmp_path), toxic_label=toxic)(TEXTS)
    names = [label.lower() for label in labels]
    own = next(name for name in names if name in ("toxic", "toxicity", str(toxic).lower()))
    for text, scores in zip(TEXTS, found, strict=True):
        expected = dict(zip(names, probabilities(logits_of(network, text)).tolist(), strict=True))
        expected["toxicity"] = expected.pop(own)
        assert scores == pytest.approx(expected, rel=1e-4)
    assert len({scores["toxicity"] for scores in found}) == 3


def test_a_folder_without_a_toxicity_classifier_is_reported(tmp_path):
    with problem("none … no config.json"):
        scorer("transformers", scorer_model=str(tmp_path / "none"))
    classifier(tmp_path, ["good", "bad"], None)
    with problem("good, bad … toxic"):
        scorer("transformers", scorer_model=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({}, "PERSPECTIVE_API_KEY"),
        ({"scorer": "detox"}, "--scorer detox … no such"),
        ({"scorer": "transformers"}, "--scorer transformers … --scorer-model"),
        ({"scorer": "a:b", "scorer_model": "folder"}, "--scorer-model … --scorer transformers"),
        ({"scorer": "a:b", "toxic_label": "bad"}, "--toxic-label … --scorer transformers"),
        ({"scorer": "a:b", "max_retries": -1}, "--max-retries -1 … 0"),
        ({"scorer": "a:b", "workers": 0}, "--workers 0 … 1"),
    ],
)
def test_contradictions_between_flags_are_problems(options, reported):
    (message,) = scorer_problems(ScorerConfig(**options), api_key="")
    require_problem(reported, [message])


def test_a_key_does_not_show():
    factory = ScorerFactory(ScorerConfig(), "a-secret-key")
    assert [*scorer_problems(factory.config, api_key=factory.api_key)] == []
    assert "a-secret-key" not in f"{factory} {factory.options}"
