"""Command lines that people have, sizes apart, and every way to start them."""

import json
import re
import sys
from pathlib import Path

from jobs import (
    PRETRAIN,
    Corpus,
    clean_environment,
    journal,
    launched,
    losses,
    start,
    start_ranks,
    tool,
)

from megatron.checkpointing.manifest import read_manifest


def tensorboard_tags(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_the_deepspeed_command_with_pipeline_zero_and_ramp(corpus: Corpus, tmp_path: Path) -> None:
    save, board, json_file = tmp_path / "save", tmp_path / "board", tmp_path / "ds.json"
    json_file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "train_batch_size": 8,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": True},
                "steps_per_print": 2000,
                "wall_clock_breakdown": False,
            }
        )
    )
    done = launched(
        2,
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2"),
        *("--distributed-backend", "gloo"),
        *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2"),
        *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1"),
        *("--rampup-batch-size", "2", "2", "1_0", "--global-batch-size", "8"),
        *("--train-samples", "1_00", "--optimizer", "adam", "--adam-beta1", "0.9"),
        *("--adam-beta2", "0.95", "--adam-eps", "1e-8", "--lr", "1e-3"),
        *("--lr-warmup-samples", "5", "--clip-grad", "1.0", "--weight-decay", "1e-1"),
        *corpus.flags,
        *("--bf16", "--log-interval", "1", "--save-interval", "10", "--eval-interval", "10"),
        *("--eval-iters", "2", "--checkpoint-activations", "--split", "80,10,10"),
        *("--save", str(save), "--load", str(save), "--tensorboard-dir", str(board)),
        *("--tensorboard-queue-size", "5", "--log-timers-to-tensorboard"),
        *("--log-batch-size-to-tensorboard", "--log-validation-ppl-to-tensorboard"),
        *("--deepspeed", "--deepspeed_config", str(json_file), "--zero-stage", "1"),
        "--deepspeed-activation-checkpointing",
    ).succeeded()

    log = done.outputs[0]
    assert "no checkpoint in" in log
    assert log.count("--deepspeed: every run goes through DeepSpeed") == 1
    # The increment of 2 comes after every third of 10 samples: at 3 1/3, 6 2/3 and 10.
    sizes = [r["global_batch_size"] for r in journal(save, "train")]
    assert sizes[:4] == [2, 2, 4, 6]
    assert set(sizes[4:]) == {8}
    manifest = read_manifest(save / (save / "latest").read_text())
    assert manifest.state.samples == manifest.state.tokens // 32
    assert 92 < manifest.state.samples <= 100
    assert losses(save)[-1] < losses(save)[0]
    assert {r["set"] for r in journal(save, "evaluation")} == {"valid", "test"}
    assert {
        "iteration-time/world_size",
        "steps-vs-samples/y=steps,x=samples",
        "learning-rate/learning-rate vs samples",
        "batch-size/batch-size",
        "lm-loss-training/lm loss vs gigaflos (without embeddings)",
        "grad-norm/grad-norm vs tokens",
        "iteration-time/TFLOPs per gpu (estimated)",
        "lm-loss-validation/valid/lm loss validation",
        "lm-loss-validation/valid/lm loss validation ppl vs samples",
    } <= tensorboard_tags(board)


def test_generation_continues_prompts(corpus: Corpus, tmp_path: Path) -> None:
    save = tmp_path / "save"
    start_ranks(
        2,
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
        *("--seq-length", "32", "--max-position-embeddings", "48", "--micro-batch-size", "2"),
        *("--global-batch-size", "8", "--lr", "3e-3", "--train-iters", "10"),
        *("--tensor-model-parallel-size", "2", "--eval-iters", "0"),
        *("--save", str(save), "--save-interval", "10", *corpus.flags),
    ).succeeded()
    program, load = "tools/generate_samples_gpt.py", ["--load", str(save)]

    words = ["--prompt", "def main(", "--out-seq-length", "5", "--greedy"]
    output = tool(program, *load, *words).succeeded()
    assert "Context:\ndef main(\n\nMegatron-LM:\n" in output.outputs[0]

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\nstop here\n\nthe last line")
    tool(program, *load, "--sample-input-file", str(prompts), "--top_k", "5").succeeded()
    written = (tmp_path / "prompts.txt.out").read_text()
    assert written.count("Context:\n") == written.count("Megatron-LM:\n") == 4
    assert "Context:\nthe last line\n" in written

    genfile = tmp_path / "samples.jsonl"
    words = ["--num-samples", "3", "--genfile", str(genfile), "--top_p", "0.9"]
    tool(program, *load, *words, "--out-seq-length", "4").succeeded()
    samples = [json.loads(line) for line in genfile.read_text().splitlines()]
    assert [set(s) for s in samples] == [{"text", "length", "finished"}] * 3
    assert all(1 <= s["length"] <= 4 for s in samples)

    refused = tool(program, *load, "--prompt", "x", "--hidden-size", "64")
    assert refused.codes == [2]
    assert re.search(r"--hidden-size +32 +64\n", refused.outputs[0])


def test_a_yaml_file_starts_the_same_run_as_its_flags(corpus: Corpus, tmp_path: Path) -> None:
    lines = {
        "model": {"num_layers": 2, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 16},
        "micro-batch-size": 2,
        "train-iters": 3,
        "lr": 0.001,
        "eval-iters": 0,
        "log-interval": 1,
        "save-interval": 3,
        "checkpoint-activations": True,
        "fp16": False,
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(lines))  # JSON is YAML
    flags = [
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
        *("--seq-length", "16", "--micro-batch-size", "2", "--train-iters", "3", "--lr", "0.001"),
        *("--eval-iters", "0", "--log-interval", "1", "--save-interval", "3"),
        "--checkpoint-activations",
    ]
    assert "RANK" not in clean_environment()
    words = [*corpus.flags, "--save"]
    saves = tmp_path / "file", tmp_path / "flags"
    start(sys.executable, PRETRAIN, "--config", str(file), *words, str(saves[0])).succeeded()
    tool("pretrain_gpt.py", *flags, *words, str(saves[1])).succeeded()
    assert losses(saves[0]) == losses(saves[1])
