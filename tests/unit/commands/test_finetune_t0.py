"""finetune_t0.py is the program of the longer name."""

import subprocess
import sys

from scripts import PROGRAMS

import finetune_t0
import finetune_t0_non_causal_decoder
from megatron.training import entry


def test_finetune_t0_trains_as_the_program_of_the_longer_name(monkeypatch):
    objectives = []
    monkeypatch.setattr(
        entry, "train", lambda config, objective, **rest: objectives.append(objective)
    )
    words = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2"]
    words += ["--seq-length", "8", "--micro-batch-size", "1", "--lr", "1"]
    for main in (finetune_t0.main, finetune_t0_non_causal_decoder.main):
        main(words)
    assert objectives == ["multitask"] * 2
    long = f"{finetune_t0_non_causal_decoder.__name__}.py"
    assert PROGRAMS["finetune_t0.py"] is PROGRAMS[long]


def test_finetune_t0_has_its_name():
    done = subprocess.run(
        [sys.executable, finetune_t0.__file__, "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("finetune_t0.py ")
