"""Networks of --preset: each can be planned, and is as large as its file states."""

import re
from pathlib import Path

import pytest
from problems import problem

from megatron.config.config import parse_config
from megatron.config.parsing.files import preset_file, preset_vocabulary
from megatron.config.plan.plan import plan

MODELS = Path(__file__).parents[4] / "examples" / "models"
PRESETS = sorted(file.stem for file in MODELS.glob("*.yaml"))
SIZE = re.compile(r"([\d,]+) parameters")
RUN = "--micro-batch-size 1 --train-iters 10 --lr 1e-4 --make-vocab-size-divisible-by 1"


def planned(preset, *, vocab_size):
    (program,) = re.findall(r"pretrain_(\w+)\.py", preset_file(preset).read_text()) or ["gpt"]
    kind = "_text_document" if program == "gpt" else "_text_sentence"
    words = [*RUN.split(), "--preset", preset, "--data-path", f"corpus{kind}"]
    if program == "t5":
        words += ["--vocab-extra-ids", "100"]
    config, _ = parse_config(words)
    return plan(config, world_size=1, vocab_size=vocab_size, device="cpu", objective=program)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_network_has_the_size_of_its_file_or_name(preset):
    network = planned(preset, vocab_size=preset_vocabulary(preset)).model
    if parameters := SIZE.search(preset_file(preset).read_text()):
        assert network.num_parameters == int(parameters[1].replace(",", ""))
    else:  # BERT and T5 as this program has them, with heads of their own
        size = float(preset.rpartition("-")[2].removesuffix("m")) * 1e6
        assert network.num_parameters == pytest.approx(size, rel=0.05)


def test_flags_and_files_win_over_a_preset(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: llama-3-8b\nnum-layers: 3\nseq-length: 64\n")
    config, _ = parse_config([*RUN.split(), "--config", str(file), "--seq-length", "128"])
    assert (config.model.num_layers, config.model.seq_length) == (3, 128)
    assert (config.model.hidden_size, config.model.rotary_base) == (4096, 500_000)


def test_the_large_example_is_a_run_that_can_be_planned():
    config, notices = parse_config(["--config", str(MODELS.parent / "large.yaml")])
    decided = plan(config, world_size=16, vocab_size=128_256, device="cuda")
    assert decided.model.num_parameters == 8_030_261_248
    assert notices == ()


def test_an_unknown_preset_names_near_ones():
    with problem("--preset llama3-8b: … did you mean llama-3-8b"):
        parse_config([*RUN.split(), "--preset", "llama3-8b"])
    with problem("--preset xyzzy: … one of … gpt2-124m"):
        parse_config([*RUN.split(), "--preset", "xyzzy"])
