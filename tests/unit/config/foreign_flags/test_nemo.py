"""NeMo's settings as flags: commands as documented, names of networks, wrong keys and paths."""

import json

import pytest

from megatron.common.errors import ConfigError
from megatron.config.foreign_flags.nemo import (
    PRETRAINED,
    TEXT_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    NemoTask,
    nemo_flags,
)

TASK = NemoTask(
    defaults={"model.optim.lr": 3e-5, "trainer.max_epochs": 2},
    flags={},
    fixed={"model.head.activation": "relu"},
    file="file",
)
MODEL = "model.language_model"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a checkpoint of two ranks and its configuration."""
    for rank in range(2):
        path = tmp_path / f"iter_0080000/mp_rank_{rank:02d}/model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    sizes = {"hidden-size": 64, "num-attention-heads": 4, "num-layers": 2, "max-seq-length": 32}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(*words, world_size=1):
    return nemo_flags(words, TASK, world_size=world_size)


def test_the_documented_command(folder):
    found = flags(
        *("model.train_ds.file=T", "model.validation_ds.file=V", "trainer.max_epochs=3"),
        f"{MODEL}.pretrained_model_name=megatron-bert-345m-uncased",
        f"{MODEL}.lm_checkpoint=iter_0080000",
        f"{MODEL}.config_file=config.json",
        *("model.tokenizer.vocab_file=vocab.txt", "trainer.precision=bf16"),
        *("exp_manager.exp_dir=out", "exp_manager.resume_if_exists=true", "--lr-warmup-iters", "3"),
    )
    assert {
        *("--train-data=T", "--valid-data=V", "--epochs=3", "--lr=3e-05", "--bf16"),
        *("--pretrained-checkpoint=iter_0080000", "--vocab-file=vocab.txt", "--hidden-size=64"),
        *("--num-layers=2", "--num-attention-heads=4", "--max-position-embeddings=32"),
        *("--tokenizer-type=BertWordPieceLowerCase", "--save=out", "--load=out"),
        "--tensorboard-dir=out/tensorboard",
    } <= {*found}
    assert found[-2:] == ["--lr-warmup-iters", "3"]


def test_sizes_by_underscores_in_yaml_and_by_name(folder):
    (folder / "run.yaml").write_text(
        "model:\n  language_model:\n    config: {hidden_size: 32, max_position_embeddings: 64}\n"
    )
    name = f"{MODEL}.pretrained_model_name=megatron-bert-345m-cased"
    checkpoint = f"{MODEL}.lm_checkpoint=iter_0080000"
    found = flags("--config-name=run", name, checkpoint)
    assert {"--hidden-size=32", "--num-layers=24", "--max-position-embeddings=64"} <= {*found}
    assert "--tokenizer-type=BertWordPieceCase" in found


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_name_is_a_folder_beside_the_run(folder, name):
    (folder / name).mkdir()
    (folder / name / "vocab.txt").write_text("[PAD]\n")
    found = flags(f"{MODEL}.pretrained_model_name={name}")
    assert f"--pretrained-checkpoint={name}" in found
    assert f"--vocab-file={name}/vocab.txt" in found
    case = "LowerCase" if name.endswith("uncased") else "Case"
    assert f"--tokenizer-type=BertWordPiece{case}" in found


def test_accumulated_batches_count_the_replicas():
    words = ["model.train_ds.batch_size=8", "trainer.accumulate_grad_batches=3"]
    assert "--global-batch-size=48" in flags(*words, world_size=2)


def test_evaluation_takes_the_test_file():
    found = flags("do_training=false", "model.test_ds.file=F", "pretrained_model=run")
    assert {"--epochs=0", "--valid-data=F", "--load=run"} <= {*found}
    assert "--epochs=2" not in found


def test_files_of_a_folder_and_names_of_numbered_labels():
    words = ["model.dataset.data_dir=data"]
    assert {"--train-data=data/text_train.txt", "--valid-data=data/text_dev.txt"} <= {
        *nemo_flags(words, TOKEN_CLASSIFICATION, world_size=1)
    }
    words = ["model.dataset.num_classes=3", "model.train_ds.file_path=F"]
    found = nemo_flags(words, TEXT_CLASSIFICATION, world_size=1)
    assert found[:5] == ["--train-data=F", "--labels", "0", "1", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.validation_ds=F", "write model.validation_ds.file=F"),
        ("model.optim.learning=1", "unknown setting model.optim.learning"),
        ("model.optim.lrr=1", "did you mean model.optim.lr?"),
        (f"{MODEL}.pretrained_model_name=megatron-bert", "known names are megatron-bert-345m-unc"),
        (f"{MODEL}.pretrained_model_name=megatron-bert-345m-uncased", "nothing is downloaded"),
        (f"{MODEL}.pretrained_model_name=megatron-bert-cased", "needs model.language_model.lm_che"),
        (f"{MODEL}.lm_checkpoint=iter_008000", "did you mean iter_0080000?"),
        (f"{MODEL}.config_file=none.json", "No such file"),
        (f"{MODEL}.config.width=3", "unknown key width"),
        ("model.head.activation=gelu", "can be relu only, not gelu"),
        ("model.train_ds.num_samples=5", "can be -1 only"),
        ("model.test_ds.file=F", "is evaluated by itself"),
        ("trainer.devices=4", "start 4 with a launcher"),
        ("trainer.precision=8", "write 32, 16 or bf16"),
        ("model.optim.sched.name=Steps", "known are WarmupAnnealing"),
    ],
)
def test_refused(folder, words, message):
    with pytest.raises(ConfigError) as caught:
        flags(*words.split())
    assert message in str(caught.value)
