"""The scripts of examples/ do what they say, with networks as small as can be.

A script that ends in another one is run, and so is that: what stands in ENDS_IN has no run of its
own. GPT-3 is planned.
"""

import json
from pathlib import Path

import pytest
from example_scripts import SMALL, example
from jobs import REPOSITORY, Corpus, clean_environment, journal

from megatron.config.config import parse_config
from megatron.config.plan.plan import plan

PROCESSES = {
    "pretrain_gpt.sh": 1,
    "pretrain_gpt_single_node.sh": 4,
    "pretrain_gpt_distributed.sh": 8,
    "pretrain_gpt_distributed_with_mp.sh": 8,
    "pretrain_gpt3_175B.sh": 1024,
    "pretrain_gpt_curriculum.sh": 2,
    "pretrain_bert.sh": 1,
    "pretrain_bert_distributed.sh": 8,
    "pretrain_bert_distributed_with_mp.sh": 8,
    "pretrain_multilingual.sh": 1,
    "codeparrot.sh": 1,
}
"""Scripts that train, and how many processes they start in the test that plans them."""


ENDS_IN = {
    "pretrain_gpt_curriculum.sh": ["pretrain_gpt_single_node.sh", "pretrain_gpt.sh"],
    "pretrain_gpt_distributed_with_mp.sh": ["pretrain_gpt_distributed.sh", "pretrain_gpt.sh"],
    "pretrain_bert_distributed_with_mp.sh": ["pretrain_bert_distributed.sh", "pretrain_bert.sh"],
    "pretrain_t5_distributed_with_mp.sh": ["pretrain_t5_distributed.sh", "pretrain_t5.sh"],
}
"""Scripts that run here, and those that they end in."""

RUN_ALONE = {
    "codeparrot.sh",
    "generate_text.sh",
    "evaluate_zeroshot_gpt.sh",
    "pretrain_gpt3_175B.sh",
    "finetune_mnli_distributed.sh",
    "finetune_race_distributed.sh",
    "finetune_relations.sh",
}


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which codeparrot.sh has run."""
    folder = tmp_path_factory.mktemp("codeparrot")
    lines = Path(corpus.text_file).read_text().splitlines()[:5]
    contents = (json.dumps({"content": json.loads(line)["text"]}) + "\n" for line in lines)
    (folder / "codeparrot_data.json").write_text("".join(contents))
    once = {"WORKERS": "1", "LR_WARMUP_ITERS": "1"}
    example("codeparrot.sh", folder, **SMALL, **files_of(corpus), **once)
    return folder


def files_of(corpus: Corpus) -> dict[str, str]:
    return {"VOCAB_FILE": corpus.vocab_file, "MERGE_FILE": corpus.merge_file}


def test_codeparrot_becomes_token_files_and_checkpoints(trained: Path) -> None:
    assert (trained / "codeparrot_content_document.bin").stat().st_size > 0
    checkpoints = trained / "codeparrot_checkpoints"
    assert (checkpoints / "latest").read_text() == "global_step2"
    assert [step["iteration"] for step in journal(checkpoints, "train")] == [1, 2]


def test_a_prompt_is_continued(trained: Path) -> None:
    run = {"CHECKPOINT_PATH": "codeparrot_checkpoints", "OUT_SEQ_LENGTH": "8"}
    written = example("generate_text.sh", trained, PROMPT="def f(", **run)
    assert "Context:\ndef f(\n" in written.outputs[0]


@pytest.mark.parametrize(
    ("task", "file", "text", "printed"),
    [
        (
            "WIKITEXT103",
            "wiki.tokens",
            " = Homarus = \n The lobster lives in the sea . \n",
            "avg loss",
        ),
        (
            "LAMBADA",
            "lambada.jsonl",
            '{"text": "The lobster lives in the sea"}\n',
            "number correct",
        ),
    ],
    ids=["WikiText", "LAMBADA"],
)
def test_a_model_is_evaluated(trained: Path, task: str, file: str, text: str, printed: str) -> None:
    (trained / file).write_text(text)
    run = {"CHECKPOINT_PATH": "codeparrot_checkpoints", "TASK": task, "VALID_DATA": file}
    (output,) = example("evaluate_zeroshot_gpt.sh", trained, **run).outputs
    assert f"validation results on {task} | {printed}: " in output


def test_samples_grow_on_one_node_under_deepspeed(corpus: Corpus, tmp_path: Path) -> None:
    lengths = {"MIN_LENGTH": "8", "CURRICULUM_STEPS": "2", "GPUS_PER_NODE": "2"}
    own = {**SMALL, **files_of(corpus), **lengths, "TRAIN_ITERS": "3"}
    example("pretrain_gpt_curriculum.sh", tmp_path, **own, DATA_PATH=corpus.prefix)
    tokens = [step["consumed_tokens"] for step in journal(tmp_path / "checkpoints", "train")]
    assert tokens == [4 * 16, 4 * (16 + 32), 4 * (16 + 32 + 32)]


def test_layers_are_divided_over_processes(corpus: Corpus, tmp_path: Path) -> None:
    layout = {"GPUS_PER_NODE": "2", "TENSOR_PARALLEL": "1", "PIPELINE_PARALLEL": "2"}
    own = {**SMALL, **files_of(corpus), **layout, "DATA_PATH": corpus.prefix}
    example("pretrain_gpt_distributed_with_mp.sh", tmp_path, **own)
    checkpoint = tmp_path / "checkpoints" / "global_step2"
    assert (checkpoint / "mp_rank_01_model_states.pt").exists()
    assert len([*checkpoint.glob("layer_*.pt")]) > 2


def test_gpt_3_is_planned(tmp_path: Path) -> None:
    wanted = {"DATA_PATH": "none", "PLAN": "--gpu a100-80gb"}
    printed = example("pretrain_gpt3_175B.sh", tmp_path, **wanted).outputs[0]
    assert "parameters: 174,615,846,912 |" in printed
    assert "layout: 1024 processes = tp 8 * pp 16 * sp 1 * dp 8 | ZeRO stage 1" in printed


def test_every_script_is_run() -> None:
    run = {*RUN_ALONE, *ENDS_IN, *(name for names in ENDS_IN.values() for name in names)}
    elsewhere = {"quickstart.sh", "launch.sh", "pretrain_multilingual.sh"}
    assert run | elsewhere == {file.name for file in (REPOSITORY / "examples").glob("*.sh")}
    page = (REPOSITORY / "docs" / "examples.md").read_text()
    assert [name for name in run | elsewhere if f"`examples/{name}`" not in page] == []
    for first, names in ENDS_IN.items():
        for name in names:
            script = (REPOSITORY / "examples" / first).read_text()
            assert f'exec bash "$(dirname "${{BASH_SOURCE[0]}}")/{name}"' in script
            first = name


@pytest.mark.parametrize("name", PROCESSES)
def test_the_launcher_is_given_a_run_that_can_be_planned(name: str, tmp_path: Path) -> None:
    launched = tmp_path / "launched"
    for launcher in ("python", "deepspeed"):
        program = tmp_path / launcher
        program.write_text(f"#!/bin/sh\nprintf '%s\\0' {launcher} \"$@\" > {launched}\n")
        program.chmod(0o755)
    (tmp_path / "corpus.idx").touch()
    variables = {"DATA_PATH": "corpus", "LANGUAGES": "en:0.7:a fr:0.3:b", "TOKENIZER": "t"}
    variables["CHECKPOINT_PATH"] = str(tmp_path / "checkpoints")
    variables["PATH"] = f"{tmp_path}:{clean_environment()['PATH']}"
    if "single_node" in name or "curriculum" in name:
        variables["GPUS_PER_NODE"] = str(PROCESSES[name])
    example(name, tmp_path, "--seed", "7", **variables)

    words = launched.read_text().rstrip("\0").split("\0")
    objective = "bert" if "bert" in name else "gpt"
    at = words.index(str(REPOSITORY / f"pretrain_{objective}.py"))
    assert _processes(words[:at]) == PROCESSES[name]
    config, _ = parse_config(words[at + 1 :])
    decided = plan(
        config,
        world_size=PROCESSES[name],
        vocab_size=50257,
        device="cuda",
        objective=objective,
    )
    assert config.training.seed == 7
    if "175B" in name:
        assert decided.parallel.tensor * decided.parallel.pipeline == 128


def _processes(launcher: list[str]) -> int:
    reported = dict(zip(launcher, launcher[1:], strict=False))
    if reported.get("-m") == "torch.distributed.run":
        return int(reported["--nnodes"]) * int(reported["--nproc_per_node"])
    return int(reported.get("--num_gpus", 1))
