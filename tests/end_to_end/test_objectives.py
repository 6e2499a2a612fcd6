"""Every objective trains from its own script, and goes on as if it had never stopped."""

import json
import random
import shutil
from pathlib import Path

import pytest
from jobs import REPOSITORY, Corpus, journal, losses, start_ranks, tool
from sentence_corpora import write_sentences, write_vocabulary

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--lr", "3e-3", "--train-iters", "4", "--log-interval", "1", "--save-interval", "2"),
    *("--eval-interval", "2", "--eval-iters", "1", "--split", "80,20"),
]
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


def trained_and_resumed(script: str, ranks: int, flags: list[str], folder: Path) -> Path:
    """Train, go on from the middle elsewhere, and return where the whole run saved."""
    whole, resumed = folder / "whole", folder / "resumed"
    program = str(REPOSITORY / script)
    start_ranks(ranks, *flags, "--save", str(whole), script=program).succeeded()
    shutil.copytree(whole / "global_step2", resumed / "global_step2")
    start_ranks(
        ranks, *flags, "--save", str(resumed), "--load", str(resumed), script=program
    ).succeeded()
    assert losses(resumed) == losses(whole)[2:]
    evaluations = [record["lm_loss"] for record in journal(whole, "evaluation")]
    assert [record["lm_loss"] for record in journal(resumed, "evaluation")] == evaluations[1:]
    return whole


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


BERT = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", "--zero-stage", "1"]


def sentence_flags(folder: Path) -> list[str]:
    """Write token files of sentences and a vocabulary; return the flags of a run on them."""
    sizes = [random.Random(0).randint(3, 12) for _ in range(400)]
    write_sentences(folder / "sentences", sizes, [*range(0, 401, 4)])
    vocabulary = write_vocabulary(folder / "vocab.txt")
    return [*RUN, "--data-path", str(folder / "sentences"), "--vocab-file", vocabulary]


def require_resharded(script: str, flags: list[str], save: Path, folder: Path) -> None:
    """Go on from the middle of a run in the layout of `flags`; the losses are close to the run's."""
    other = folder / "other"
    shutil.copytree(save / "global_step2", other / "global_step2")
    words = ["--save", str(other), "--load", str(other)]
    start_ranks(2, *flags, *words, script=str(REPOSITORY / script)).succeeded()
    assert losses(other) == pytest.approx(losses(save)[2:], rel=1e-2)


def test_bert(tmp_path: Path) -> None:
    flags = [*sentence_flags(tmp_path), "--tensorboard-dir", str(tmp_path / "curves")]
    save = trained_and_resumed("pretrain_bert.py", 2, [*flags, *BERT], tmp_path)
    steps = journal(save, "step")
    assert all(step["loss"] == pytest.approx(step["lm_loss"] + step["sop_loss"]) for step in steps)
    assert all("sop_loss" in record for record in journal(save, "evaluation"))
    # Two stages, on other kernels.
    flags += ["--pipeline-model-parallel-size", "2", "--bf16"]
    flags += ["--attention-impl", "reference", "--checkpoint-activations"]
    require_resharded("pretrain_bert.py", flags, save, tmp_path)


T5 = [
    *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-split-rank", "1"),
    *("--bf16", "--zero-stage", "1"),
]


def test_t5(tmp_path: Path) -> None:
    flags = [*sentence_flags(tmp_path), "--decoder-seq-length", "16"]
    save = trained_and_resumed("pretrain_t5.py", 2, [*flags, *T5], tmp_path)
    flags += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"]
    require_resharded("pretrain_t5.py", flags, save, tmp_path)
    words = ["--load", str(save), "--greedy", "--text", "w6 w7 <extra_id_0> w9"]
    (output,) = tool("tools/text_to_text.py", *words).succeeded().outputs
    assert "\n  filled: w6 w7 " in output


RETRO = [
    *("--num-layers", "8", "--hidden-size", "32", "--num-attention-heads", "4", "--lr", "3e-3"),
    *("--micro-batch-size", "1", "--vocab-size", "60", "--log-interval", "1", "--device", "cpu"),
    *("--save-interval", "2", "--attention-dropout", "0", "--hidden-dropout", "0"),
]


def test_retro(tmp_path: Path) -> None:
    """A run goes on in another layout; a GPT on the same samples can be gone on with as a Retro."""
    from retro_project import random_documents, write_project

    project = write_project(tmp_path / "project", random_documents(60))
    flags = [*RETRO, "--retro-project-dir", str(project)]
    script = str(REPOSITORY / "pretrain_retro.py")
    save, other = tmp_path / "retro", tmp_path / "other"
    words = [*flags, "--retro-add-retriever", "--retro-encoder-hidden-dropout", "0"]
    words += ["--retro-encoder-attention-dropout", "0"]
    stages = ["--pipeline-model-parallel-size", "2", "--save", str(save)]
    start_ranks(2, *words, *stages, "--checkpoint-activations", script=script).succeeded()
    shutil.copytree(save / "global_step2", other / "global_step2")
    tensor = ["--tensor-model-parallel-size", "2", "--load", str(other), "--save", str(other)]
    saved = [*RETRO[6:], "--use-checkpoint-args"]
    start_ranks(2, *saved, *tensor, script=script).succeeded()
    assert losses(other) == pytest.approx(losses(save)[2:], rel=1e-4)
    evaluations = [record["lm_loss"] for record in journal(save, "evaluation")]
    found = [record["lm_loss"] for record in journal(other, "evaluation")]
    assert found == pytest.approx(evaluations[1:], rel=1e-4)

    gpt, fitted = tmp_path / "gpt", tmp_path / "fitted"
    start_ranks(1, *flags, "--save", str(gpt), "--exit-interval", "2", script=script).succeeded()
    load = ["--load", str(gpt), "--finetune", "--no-load-optim", "--save", str(fitted)]
    gate = ["--retro-attention-gate", "0", "--lr", "1e-9", "--exit-interval", "2"]
    start_ranks(2, *words, *load, *gate, *stages[:2], script=script).succeeded()
    last, first = (journal(run, "evaluation")[0]["lm_loss"] for run in (gpt, fitted))
    assert first == pytest.approx(last, rel=1e-5)
