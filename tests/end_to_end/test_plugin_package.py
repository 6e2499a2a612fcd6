"""A package outside of megatron brings parts of a run, and its own script trains with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import Corpus, journal, losses, start_ranks, tool

EXAMPLE = Path(__file__).parent / "plugin_example"
SCRIPT = str(EXAMPLE / "train.py")
PLUGIN = str(EXAMPLE / "my_plugin" / "__init__.py")
RANKS = 4


@pytest.fixture
def run(corpus: Corpus, tmp_path: Path) -> dict[str, Any]:
    notes = tmp_path / "notes"
    notes.mkdir()
    words = ["--input", corpus.text_file, "--output-prefix", str(tmp_path / "corpus")]
    words += ["--tokenizer-type", "letters", "--plugin", PLUGIN, "--append-eod"]
    tool("tools/preprocess_data.py", *words).succeeded()
    return {
        "network": {
            **{"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 32},
            **{"position-embedding-type": "waves", "wave_base": 100.0},
            **{"activation": "mish", "normalization": "centred", "attention-impl": "halved"},
        },
        "batches": {"micro-batch-size": 1, "global-batch-size": 4, "train-iters": 4},
        "steps": {
            **{"optimizer": "signs", "sign_momentum": 0.5, "lr": 3e-3},
            **{"lr-decay-style": "beats", "beats": 1},
        },
        "layout": {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2},
        "data": {
            **{"data-path": str(tmp_path / "corpus_text_document"), "split": "90,10,0"},
            **{"tokenizer-type": "letters", "dataset": "backwards"},
            "data-cache-path": str(tmp_path / "cache"),
        },
        "run": {"log-interval": 1, "save-interval": 2, "device": "cpu"},
        "evaluation": {"eval-iters": 1, "eval-interval": 4},
        "plugins": {
            **{"plugin": ["my_plugin"], "objective": "late", "late_weight": 2.0},
            **{"hook": ["notes"], "notes": str(notes), "metric": ["tokens_per_weight"]},
        },
    }


def file_of(run: dict[str, Any], file: Path, **more: object) -> str:
    """Write the flags of a run to `file`; return its path."""
    file.write_text(yaml.safe_dump({**run, "more": more}))
    return str(file)


def test_every_part_of_a_plugin_acts_and_the_run_resumes(
    run: dict[str, Any], tmp_path: Path
) -> None:
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    first = file_of(run, tmp_path / "run.yaml", save=str(full))
    again = {"save": str(resumed), "load": str(full), "ckpt-step": 2}
    second = file_of(run, tmp_path / "again.yaml", **again)
    outputs = start_ranks(RANKS, first, script=SCRIPT).succeeded().outputs
    assert "script's own hook: step 4" in outputs[0]
    start_ranks(RANKS, second, script=SCRIPT).succeeded()
    assert losses(resumed) == losses(full)[2:]
    # Pipeline stages: ranks 0 and 1 embed, 2 and 3 have the loss. Tensor rank 0 of each reads.
    notes = [json.loads((tmp_path / f"notes/{rank}.json").read_text()) for rank in range(RANKS)]
    assert [note["iteration"] for note in notes] == [4] * RANKS
    assert all(note["position embedding"] for note in notes[:2])
    assert all(note["loss"] for note in notes[2:])
    assert all(
        note[part] for note in notes for part in ("activation", "norm", "attention", "optimizer")
    )
    assert notes[0]["dataset"] >= 8
    metric = [record["tokens_per_weight"] for record in journal(full, "train")]
    assert metric == [step * metric[0] for step in range(1, 5)]
    assert metric[0] > 0
    rates = [record["learning_rate"] for record in journal(full, "step")]
    assert rates == pytest.approx([3e-3, 1.5e-3, 0, 1.5e-3], abs=1e-9)
    # Its own metrics are in evaluations: late tokens count more than half.
    evaluation = journal(full, "evaluation")[-1]
    assert 0.5 < evaluation["late_share"] < 0.7
    assert f"late share value: {evaluation['late_share']:.6E}" in "".join(outputs)
    (start,) = journal(full, "start")
    assert start["flags"]["--plugin"] == ["my_plugin"]
    assert start["flags"]["--late-weight"] == 2.0
    manifest = json.loads((full / "global_step4/manifest.json").read_text())
    assert manifest["config"]["plugins"]["plugin"] == ["my_plugin"]
    assert manifest["config"]["extensions"]["WavesConfig"] == {"wave_base": 100.0}
    words = ["--load", str(full), "--save", str(tmp_path / "out"), "--exporter", "shapes"]
    output = tool("tools/convert_checkpoint/to_hf.py", *words, "--plugin", PLUGIN).succeeded()
    assert "the shapes of" in output.outputs[0]
    shapes = json.loads((tmp_path / "out/shapes.json").read_text())
    assert shapes["tied_modules.embed.word_embeddings.weight"][1] == 32
