"""lm_eval asks the server over HTTP, and finds what this project's own harness finds."""

import json

import pytest
import yaml
from chat_models import SPEC, TEMPLATE, write_tokenizer
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from servers import serving

from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
from megatron.inference.evaluation.lm_eval_harness import HarnessModel
from megatron.tokenizer.chat import ChatTemplate
from megatron.tokenizer.types.hugging_face import PretrainedFromHF

pytestmark = pytest.mark.usefixtures("unrecorded_packages")

LENGTH = 64
SHARED = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
TASKS = {
    "http_choice": CHOICE,
    "http_likelihood": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[answer]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "http_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "http_answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory of tasks and their questions."""
    folder = tmp_path_factory.mktemp("http_tasks")
    lines = [
        {
            "question": f"the {'é the ' * (i % 3)}question {i} is ",
            "choices": ["the war", "a 日本 valley", "2010"],
            "answer": i % 3,
        }
        for i in range(6)
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
    for name, task in TASKS.items():
        text = yaml.safe_dump({"task": name, "dataset_kwargs": files, **SHARED, **task})
        (folder / f"{name}.yaml").write_text(text)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return PretrainedFromHF(write_tokenizer(tmp_path_factory.mktemp("chat_tokenizer")))


@pytest.fixture(scope="module")
def running(group, tokenizer):
    template = ChatTemplate(TEMPLATE)
    with serving(group, spec=SPEC, tokenizer=tokenizer, chat=template) as running:
        yield running


def evaluated(model, names, tasks, **options):
    return simple_evaluate(
        model=model, tasks=[*names], task_manager=tasks, bootstrap_iters=0, **options
    )


def test_results_over_http_are_those_of_the_own_harness(running, tokenizer, tasks):
    theirs = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{running.port}/v1/completions",
        model="tiny",
        tokenizer_backend="huggingface",
        tokenizer=tokenizer.name,
        max_length=LENGTH,
        max_retries=1,
    )
    evaluator = DistributedEvaluator(
        running.served.engine_thread.engine.runner, rows=4, tokenizer=tokenizer
    )
    found = evaluated(theirs, TASKS, tasks)
    until_here = running.served.engine_thread.num_prompt_tokens
    own = HarnessModel(evaluator, tokenizer, length=LENGTH, seed=1)
    expected = evaluated(own, TASKS, tasks)
    assert until_here > 0 and running.served.engine_thread.num_prompt_tokens == until_here
    for name in TASKS:
        figures = {k: v for k, v in expected["results"][name].items() if isinstance(v, float)}
        assert figures
        assert {k: found["results"][name][k] for k in figures} == pytest.approx(figures, rel=1e-4)
        for one, other in zip(found["samples"][name], expected["samples"][name], strict=True):
            for mine, yours in zip(one["resps"], other["resps"], strict=True):
                if isinstance(mine[0], str):
                    assert mine == yours
                else:
                    assert mine[0] == pytest.approx(yours[0], rel=1e-4)
    is_greedy = [
        response[0][1] for sample in found["samples"]["http_choice"] for response in sample["resps"]
    ]
    assert set(is_greedy) <= {True, False}


def test_the_most_likely_continuation_is_greedy(running, tokenizer):
    model = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{running.port}/v1/completions",
        model="tiny",
        tokenizer=tokenizer.name,
        tokenizer_backend="huggingface",
        max_length=LENGTH,
        max_retries=1,
    )
    request = {"prompt": "the", "max_tokens": 1, "temperature": 0, "logprobs": 0}
    reply = running.complete(**request, return_tokens_as_token_ids=True).json
    (most_likely,) = reply["choices"][0]["logprobs"]["tokens"]
    most_likely, before = int(most_likely.removeprefix("token_id:")), tokenizer.encode("the")
    requests = [(("", ""), before, [most_likely]), (("", "x"), before, [most_likely + 1])]
    assert [is_greedy for _, is_greedy in model._loglikelihood_tokens(requests)] == [True, False]


def test_chat_completions_answer_tasks_too(running, tasks):
    model = LocalChatCompletion(
        base_url=f"http://127.0.0.1:{running.port}/v1/chat/completions",
        model="tiny",
        max_retries=1,
    )
    found = evaluated(model, ["http_answer"], tasks, apply_chat_template=True)
    assert all(sample["resps"][0][0] is not None for sample in found["samples"]["http_answer"])
