"""A package outside of megatron brings parts of a run, and its own script trains with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import Corpus, journal, losses, start_ranks

EXAMPLE = Path(__file__).parent / "plugin_example"
SCRIPT = str(EXAMPLE / "train.py")
RANKS = 4


@pytest.fixture
def run(corpus: Corpus, tmp_path: Path) -> dict[str, Any]:
    notes = tmp_path / "notes"
    notes.mkdir()
    return {
        "network": {
            **{"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 32},
            "position-embedding-type": "waves",
        },
        "batches": {"micro-batch-size": 1, "global-batch-size": 4, "train-iters": 4, "lr": 3e-3},
        "layout": {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2},
        "data": {
            **{"data-path": corpus.prefix, "split": "100,0,0"},
            **{"vocab-file": corpus.vocab_file, "merge-file": corpus.merge_file},
            **{"dataset": "backwards", "data-cache-path": str(tmp_path / "cache")},
        },
        "run": {"log-interval": 1, "save-interval": 2, "device": "cpu", "eval-iters": 0},
        "plugins": {
            **{"plugin": ["my_plugin"], "objective": "late", "late_weight": 2.0},
            **{"hook": ["notes"], "notes": str(notes), "metric": ["tokens_per_weight"]},
            "wave_base": 100.0,
        },
    }


def trained(run: dict[str, Any], folder: Path, ranks: int = RANKS, **run_flags: str) -> list[str]:
    """Run the script with these flags in four processes; return what they printed."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**run, "more": run_flags}))
    return start_ranks(ranks, str(file), script=SCRIPT).succeeded().outputs


def test_every_part_of_a_plugin_acts_and_the_run_resumes(
    run: dict[str, Any], tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    outputs = trained(run, tmp_path, save=str(whole))
    assert "script's own hook: step 4" in outputs[0]
    # Pipeline stages: ranks 0 and 1 embed, 2 and 3 have the loss. Tensor rank 0 of each reads.
    notes = [json.loads((tmp_path / f"notes/{rank}.json").read_text()) for rank in range(RANKS)]
    assert [note["iteration"] for note in notes] == [4] * RANKS
    assert all(note["position embedding"] for note in notes[:2])
    assert all(note["loss"] for note in notes[2:])
    assert notes[0]["dataset"] >= 16
    metric = [record["tokens_per_weight"] for record in journal(whole, "train")]
    assert metric == [step * metric[0] for step in range(1, 5)]
    assert metric[0] > 0
    (start,) = journal(whole, "start")
    assert start["flags"]["--plugin"] == ["my_plugin"]
    assert start["flags"]["--late-weight"] == 2.0
    manifest = json.loads((whole / "global_step4/manifest.json").read_text())
    assert manifest["config"]["plugins"]["plugin"] == ["my_plugin"]
    assert manifest["config"]["extensions"]["WavesConfig"] == {"wave_base": 100.0}
    shutil.copytree(whole / "global_step2", resumed / "global_step2")
    trained(run, tmp_path, save=str(resumed), load=str(resumed))
    assert losses(resumed) == losses(whole)[2:]
