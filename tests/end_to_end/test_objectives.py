"""Objectives beside that of a GPT: each trains from its own script, and goes on as if it had never stopped."""

import json
import random
from pathlib import Path

import pytest
from jobs import Corpus, journal, tool
from objective_runs import RUN, trained_and_resumed

PREFIX_LM = [
    *("--pipeline-model-parallel-size", "2", "--reset-attention-mask", "--reset-position-ids"),
    *("--loss-on-targets-only", "--reweight-loss-based-on-position-frequency"),
]
MULTITASK = ["--norm-target-loss", "--prefixlm"]


@pytest.fixture
def tasks(corpus: Corpus, tmp_path: Path) -> str:
    """Words and how many letters each has, as inputs and targets in token files."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcd", k=draw.randint(1, 9))) for _ in range(100)]
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        "".join(json.dumps({"inputs": word, "targets": str(len(word))}) + "\n" for word in words)
    )
    for key, end in (("inputs", []), ("targets", ["--append-eod"])):
        tool(
            "tools/preprocess_data.py",
            *("--input", str(file), "--output-prefix", str(tmp_path / "tasks")),
            *("--json-keys", key, "--tokenizer-type", "GPT2BPETokenizer", *end),
            *("--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file),
        ).succeeded()
    return str(tmp_path / "tasks")


def test_prefix_language_modelling_in_two_stages(corpus: Corpus, tmp_path: Path) -> None:
    flags = [*RUN, *PREFIX_LM, *corpus.flags]
    save = trained_and_resumed("pretrain_prefix_lm.py", 2, flags, tmp_path)
    words = ["--load", str(save), "--steps", "4"]
    samples = tool("tools/samples_of_step.py", *words).succeeded()
    assert "sample 15 | replica 0 micro-batch 3" in samples.outputs[0]


def test_multitask_finetuning(corpus: Corpus, tasks: str, tmp_path: Path) -> None:
    flags = [*RUN, *MULTITASK, "--data-path", tasks, *corpus.flags[2:]]
    save = trained_and_resumed("finetune_t0_non_causal_decoder.py", 1, flags, tmp_path)
    held_out = [record["lm_loss"] for record in journal(save, "evaluation")]
    assert held_out[-1] < held_out[0]
    words = ["--load", str(save), "--steps", "1"]
    samples = tool("tools/samples_of_step.py", *words).succeeded()
    assert f"{tasks}_inputs_document sample 0 | documents " in samples.outputs[0]
