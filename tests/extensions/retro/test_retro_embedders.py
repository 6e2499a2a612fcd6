"""Embedders of Retro that are encoder networks."""

from shutil import copytree

import numpy as np
import pytest
import torch
from masked_lms import masked_lm
from problems import problem
from retro_preprocessing import (
    TOOL,
    chunks_of,
    config_of,
    neighbors_of,
    preprocess,
    words_for,
    write_corpora,
)
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from megatron.common.errors import DataError, MegatronError
from megatron.extensions.retro.embedders import counter_of, embedder_of
from megatron.extensions.retro.inference_embedders import (
    Batches,
    BertEmbedder,
    TransformersEmbedder,
)
from megatron.extensions.retro.retrieval.blocks import Ranks
from megatron.extensions.retro.retrieval.project import prepare_project
from megatron.training.process.environment import Launch

ALONE = Launch(0, 1, 0, 1)
SIZES = {
    **{"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 40},
}
TEXTS = ["12 7 199", "5", "12 7 198 4 61 33", "140 3"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Directories of a MegatronBert and of a Bert of transformers, and their vocabulary."""
    folder = tmp_path_factory.mktemp("encoders")
    digits = [str(digit) for digit in range(10)]
    vocab = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *digits,
        *(f"##{each}" for each in digits),
    ]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    torch.manual_seed(0)
    for name, model in (
        ("megatron", MegatronBertForPreTraining(MegatronBertConfig(**SIZES))),
        ("bert", BertModel(BertConfig(**SIZES))),
    ):
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.2)
        model.save_pretrained(folder / name)
        BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / name)
    return folder


def project_with(folder, *flags):
    write_corpora(folder)
    return prepare_project(config_of(folder / "p", *flags), Ranks())


def test_a_padded_batch_equals_single_texts(group, tmp_path):
    model = masked_lm(tmp_path)
    rows = [[2, 5, 6, 7, 3], [2, 7, 3], [2, 5, 5, 6, 7, 8, 3]]
    singly = np.concatenate([model.embed_batch([row]) for row in rows])
    assert model.embed_batch(rows) == pytest.approx(singly, abs=1e-5)
    assert np.abs(singly[0] - singly[1]).max() > 0.01


def test_texts_are_cut_and_never_empty(group, tmp_path):
    """The network has 9 positions; a tab and [MASK] in a text are plain text."""
    model = masked_lm(tmp_path)
    embedder = BertEmbedder(model, Batches(2, 256))
    texts = ["a b c", "a b c d a b c d a b", "", "a\tb", "[MASK] a"]
    found = embedder.embed(texts)
    assert (found.shape, found.dtype) == ((5, 8), np.float32)
    rows = [
        [2, 5, 6, 7, 3],
        [2, *model.tokenizer.encode(texts[1])[:7], 3],
        [2, 0, 3],
        [2, 5, 6, 3],
        [2, *model.tokenizer.encode("[MASK] a"), 3],
    ]
    assert 4 not in rows[-1]
    assert found == pytest.approx(
        np.concatenate([model.embed_batch([row]) for row in rows]), abs=1e-5
    )
    short = BertEmbedder(model, Batches(2, 4)).embed(["a b c", "a b"])
    assert short[0] == pytest.approx(short[1], abs=1e-6)
    assert embedder.embed([]).shape == (0, 8)


def test_a_bert_and_transformers_agree_on_the_same_weights(group, encoders, tmp_path):
    flags = ["--bert-load", str(encoders / "megatron"), "--retro-bert-batch-size", "3"]
    ours = project_with(
        tmp_path,
        *("--bert-embedder-type", "megatron", *flags),
    )
    found = embedder_of(ours, ALONE)().embed(TEXTS)
    theirs = TransformersEmbedder(encoders / "megatron", Batches(2, 256), ALONE)
    assert (found.shape, theirs.width) == ((4, 16), 16)
    assert found == pytest.approx(theirs.embed(TEXTS), abs=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.01
    assert counter_of(ours)().count([*TEXTS, " "]) == [6, 1, 11, 4, 0]


def test_transformers_embedders_leave_out_the_ends(encoders):
    embedder = TransformersEmbedder(encoders / "bert", Batches(2, 6), ALONE)
    found = embedder.embed([*TEXTS, ""])
    model = BertModel.from_pretrained(encoders / "bert").eval()
    tokenizer = BertTokenizer.from_pretrained(encoders / "bert")
    for text, vector in zip(TEXTS, found, strict=False):
        ids = tokenizer.encode(text, add_special_tokens=False)[:4]
        row = torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]])
        with torch.no_grad():
            hidden = model(row).last_hidden_state[0, 1:-1].mean(0)
        assert vector == pytest.approx(hidden.numpy(), abs=1e-5)
    assert (found[4] == 0).all()


@pytest.mark.parametrize("kind", ["megatron", "huggingface"])
def test_neighbors_by_an_encoder(kind, group, encoders, tmp_path):
    folder = tmp_path / "encoder"
    copytree({"megatron": encoders / "megatron", "huggingface": encoders / "bert"}[kind], folder)
    write_corpora(tmp_path)
    flags = ["--bert-embedder-type", kind, "--bert-load", str(folder)]
    preprocess(tmp_path / "p", *flags)
    chunks = chunks_of(tmp_path / "p")
    assert chunks[:, 4].min() > 0
    assert chunks[:, 4].max() > 4  # word pieces, of which a number of three digits has three
    neighbors = neighbors_of(tmp_path / "p", "train")
    assert neighbors.shape == (160, 5)
    assert neighbors.max() < len(chunks)
    TOOL["main"](words_for(tmp_path / "p", *flags, "--retro-task-validate", "0.4"))
    with problem("no … train_ … same settings", DataError):
        TOOL["main"](["--retro-project-dir", str(tmp_path / "p"), "--retro-task-validate", "1"])
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with problem("encoder … project", DataError):
        TOOL["main"](words_for(tmp_path / "p", *flags, "--retro-task-validate", "1"))


def test_encoders_that_are_not_there_are_refused(encoders, tmp_path):
    (tmp_path / "empty").mkdir()
    for flags, message in (
        (["--bert-embedder-type", "megatron"], "megatron … --bert-load"),
        (["--bert-load", str(encoders / "bert")], "--bert-load … --bert-embedder-type megatron"),
        (
            ["--bert-embedder-type", "huggingface", "--bert-load", str(tmp_path / "none")],
            "--bert-load … none … no such directory",
        ),
        (
            [
                "--bert-embedder-type",
                "huggingface",
                "--bert-load",
                "d",
                "--retro-bert-vocab-file",
                "v",
            ],
            "--retro-bert-vocab-file … --bert-load",
        ),
        (
            ["--bert-embedder-type", "megatron", "--bert-load", str(encoders / "bert")],
            "norms after",
        ),
        (["--retro-bert-max-chunk-length", "2"], "--retro-bert-max-chunk-length 2 … 3"),
    ):
        write_corpora(tmp_path)
        with problem(message, MegatronError):
            TOOL["main"](words_for(tmp_path / "p", *flags))
    with problem("--bert-load … empty"):
        TransformersEmbedder(tmp_path / "empty", Batches(2, 6), ALONE)
