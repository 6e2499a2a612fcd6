"""Padding of the vocabulary never changes a loss, unless a run continues one in which it does."""

from pathlib import Path

import pytest
import torch
from jobs import Corpus, journal, losses, start_ranks
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.checkpointing.hugging_face.import_model import ImportOptions, import_model
from megatron.checkpointing.manifest import read_manifest, write_manifest
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

ROWS = 61  # odd, as GPT-2's 50257
RUN = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--lr", "3e-3"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "4"),
    *(
        "--log-interval",
        "1",
        "--eval-iters",
        "0",
        "--save-interval",
        "2",
        "--init-method-std",
        "0.3",
    ),
]
EVALUATION = [
    *("--use-checkpoint-args", "--finetune", "--eval-only", "--lr", "1e-5", "--train-iters", "10"),
    *("--micro-batch-size", "2", "--global-batch-size", "2", "--eval-iters", "2"),
    *("--split", "50,50,0", "--save-interval", "1"),
]


def test_a_model_with_an_odd_vocabulary_has_one_loss_in_every_layout(tmp_path: Path) -> None:
    """Its last token has a probability of about a half, and what is padded would compete with it."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": ROWS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=ROWS - 1, eos_token_id=ROWS - 1))
    with torch.no_grad():
        model.transformer.wte.weight[-1] = 0.0
        model.transformer.wte.weight[-1, 0] = 1.0
        model.transformer.ln_f.bias[0] = 4.2
    model.save_pretrained(tmp_path / "hf")
    own = import_model(tmp_path / "hf", tmp_path / "own", ImportOptions()).folder.parent
    with IndexedDatasetWriter(tmp_path / "corpus", "u2") as writer:
        for document in torch.randint(ROWS, (40, 17)).tolist():
            writer.append(document)

    found = []
    for ranks, *flags in (
        (1,),
        (2, "--tensor-model-parallel-size", "2"),
        (2, "--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "128"),
        # A checkpoint that was imported before has this size from its own flags.
        (2, "--tensor-model-parallel-size", "2", "--pad-vocab-size-to", "61"),
    ):
        save = tmp_path / f"run{len(found)}"
        places = ["--load", str(own), "--save", str(save), "--data-path", str(tmp_path / "corpus")]
        start_ranks(ranks, *EVALUATION, *places, *flags).succeeded()
        (record,) = journal(save, "evaluation")
        found.append(record["lm_loss"])
    assert found == pytest.approx(found[:1] * 4, rel=1e-5)


def test_a_run_from_before_the_flag_goes_on_with_its_softmax(
    corpus: Corpus, tmp_path: Path
) -> None:
    flags = [*RUN, *corpus.flags]
    old, fresh = tmp_path / "old", tmp_path / "fresh"
    start_ranks(1, *flags, "--save", str(old), "--padded-vocab-in-softmax").succeeded()
    start_ranks(1, *flags, "--save", str(fresh)).succeeded()
    assert losses(old)[0] > losses(fresh)[0] + 0.01
    expected = losses(old)[2:]
    for folder in (old / "global_step2", old / "global_step4"):
        manifest = read_manifest(folder)
        assert manifest.plan["model"].pop("padded_vocab_in_softmax") is True
        manifest.config["tokenizer"].pop("padded_vocab_in_softmax")
        write_manifest(folder, manifest)

    on, off = tmp_path / "on", tmp_path / "off"
    places = ["--load", str(old), "--ckpt-step", "2"]
    (output,) = start_ranks(1, *flags, *places, "--save", str(on)).succeeded().outputs
    assert "padded vocabulary columns take part in the softmax, as in Megatron-LM" in output
    assert losses(on) == expected
    assert read_manifest(on / "global_step4").spec.vocabulary.padded_vocab_in_softmax is True

    without = ["--padded-vocab-in-softmax", "False"]
    (output,) = start_ranks(1, *flags, *places, *without, "--save", str(off)).succeeded().outputs
    assert "--padded-vocab-in-softmax  given              left out" in output
    assert losses(off)[0] < expected[0] - 0.01
    assert read_manifest(off / "global_step4").spec.vocabulary.padded_vocab_in_softmax is False
