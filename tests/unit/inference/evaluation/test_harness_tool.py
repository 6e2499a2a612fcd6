"""tasks/eval_harness/evaluate.py, in this process; with lm_eval's own model beside it."""

import json

import pytest
import yaml
from problems import problem
from untrained import WRITTEN, tool_of

from megatron.common.errors import DataError, ExitCode

pytestmark = pytest.mark.usefixtures("unrecorded_packages")

SHARED = {"dataset_path": "json", "test_split": "test"}
TASKS = {
    "own_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "own_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "own_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def module():
    return tool_of("eval_harness/evaluate.py")


@pytest.fixture
def tool(module):
    return lambda *words: module.main(words)


@pytest.fixture
def tasks(tmp_path):
    """A directory of tasks and their questions."""
    words = WRITTEN.split()
    lines = [
        {
            "question": " ".join(words[i : i + 3 + i % 4]),
            "choices": ["the war", "valley folk", "2010"],
            "answer": i % 3,
        }
        for i in range(12)
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
        reported = {"task": name, **SHARED, "dataset_kwargs": files, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(reported))
    return folder


def test_results_are_those_of_lm_evals_own_model(tool, theirs, tasks, tmp_path, capsys):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, network, tokenizer = theirs
    file = tmp_path / "results.json"
    words = [
        *("--task_list", ",".join(TASKS), "--include_path", str(tasks), "--load", str(folder)),
        *("--num-layers", "-1", "--hidden-size", "-1", "--seq-length", "-1", "--adaptive_seq_len"),
        *("--micro-batch-size", "1", "--micro_bs_multiplier", "4", "--results_path", str(file)),
        *("--bootstrap_iters", "0", "--eval_fp32"),
    ]
    tool(*words)
    found = json.loads(file.read_text())["results"]
    model = HFLM(pretrained=network, tokenizer=tokenizer, batch_size=1)
    expected = simple_evaluate(
        model=model,
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )["results"]
    for name in TASKS:
        numbers = {k: v for k, v in expected[name].items() if isinstance(v, float)}
        assert numbers
        assert {k: found[name][k] for k in numbers} == pytest.approx(numbers, rel=1e-4)
    assert 0 < found["own_choice"]["acc,none"] < 1
    assert "own_text" in capsys.readouterr().out

    tool(*words, "--intermed_results", "--limit", "3")
    some = json.loads(file.read_text())
    assert set(some["results"]) == set(TASKS)
    assert some["n-samples"]["own_text"]["effective"] == 3
    with problem("--task_list … nothing_such … lm_eval ls"):
        tool(*words, "--task_list", "own_text,nothing_such")


def test_conversations_are_those_of_lm_evals_own_model(tool, theirs, tasks, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, network, tokenizer = theirs
    template = (
        "{% for m in messages %}<{{ m.content }}>{% if not loop.last %}\n{% endif %}{% endfor %}"
    )
    template += "{% if add_generation_prompt %} {% endif %}"
    file, results = tmp_path / "chat.jinja", tmp_path / "results.json"
    file.write_text(template)
    names = ["own_choice", "own_answer"]
    words = [
        *("--task_list", ",".join(names), "--include_path", str(tasks), "--load", str(folder)),
        *("--results_path", str(results), "--bootstrap_iters", "0", "--eval_fp32"),
    ]
    options = ["--log_samples", "--gen_kwargs", "max_gen_toks=3,temperature=0"]
    tool(*words, *options, "--apply_chat_template", "--chat-template", str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", template)
        expected = simple_evaluate(
            model=HFLM(pretrained=network, tokenizer=tokenizer, batch_size=1),
            tasks=names,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
            apply_chat_template=True,
            gen_kwargs="max_gen_toks=3,temperature=0",
        )
    found = json.loads(results.read_text())
    assert set(found["results"]) == set(names) and "samples" not in found
    for name in names:
        lines = (tmp_path / f"results.json.samples.{name}.jsonl").read_text().splitlines()
        for line, theirs_one in zip(lines, expected["samples"][name], strict=True):
            own = json.loads(line)
            assert own["arguments"] == json.loads(json.dumps(theirs_one["arguments"]))
            assert own["arguments"][0][0].startswith("<") or "gen_args_0" in own["arguments"]
            for mine, yours in zip(own["resps"], theirs_one["resps"], strict=True):
                if name == "own_answer":
                    assert mine == list(yours)
                else:
                    assert float(mine[0][0]) == pytest.approx(yours[0][0], rel=1e-4)
    (tmp_path / "results.json.samples.own_choice.jsonl").unlink()
    tool(*words, "--predict_only", "--limit", "2")
    assert "acc,none" not in json.loads(results.read_text())["results"]["own_choice"]
    answers = (tmp_path / "results.json.samples.own_choice.jsonl").read_text().splitlines()
    assert len(answers) == 2 and json.loads(answers[0])["resps"]
    with problem("chat template … --chat-template"):
        tool(*words, "--apply_chat_template")


def test_questions_that_cannot_be_downloaded_are_reported(
    tool, theirs, tasks, tmp_path, monkeypatch
):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'json' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    words = ["--task_list", "own_text", "--include_path", str(tasks), "--load", str(theirs[0])]
    with problem("--task_list own_text … Couldn't reach … HF_HOME", DataError) as caught:
        tool(*words, "--results_path", str(tmp_path / "results.json"))
    assert caught.value.exit_code == ExitCode.FAILED


def test_a_missing_package_is_reported(tool, theirs, modules):
    modules("lm_eval")
    with problem("lm_eval … requirements-eval.txt"):
        tool("--load", str(theirs[0]), "--task_list", "own_text", "--num-layers", "-1")


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ([], "--task_list all are thousands"),
        (["--task_list", "a,,b"], "has an empty name"),
        (["--task_list", "a", "--micro_bs_multiplier", "0"], "must be at least 1"),
        (["--task_list", "a", "--bootstrap_iters", "-1"], "must be at least 0"),
        (["--task_list", "a", "--num_fewshot", "-1"], "must be at least 0"),
        (["--task_list", "a", "--limit", "0"], "--limit 0 … 1"),
        (["--task_list", "a", "--gen_kwargs", "top_k=1,best"], "--gen_kwargs 'best' … NAME=VALUE"),
        (["--task_list", "a", "--gen_kwargs", "topk=1"], "--gen_kwargs 'topk=1' … NAME=VALUE"),
        (["--task_list", "a", "--chat-template", "x"], "--chat-template … --apply_chat_template"),
        (["--task_list", "a", "--results_path", "none/file"], "--results_path … none"),
        (
            ["--task_list", "a", "--seq-length", "13"],
            "--seq-length 13 … --max-position-embeddings 12",
        ),
    ],
)
def test_a_contradiction_is_reported(tool, theirs, flags, reported):
    with problem(reported):
        tool("--load", str(theirs[0]), *flags)
