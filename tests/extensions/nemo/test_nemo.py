"""NeMo's settings as flags: commands as documented, names of networks, wrong keys and paths."""

import json

import pytest
from problems import problem

from megatron.common.errors import ConfigError
from megatron.extensions.nemo.flags import nemo_flags
from megatron.extensions.nemo.flags_networks import PRETRAINED
from megatron.extensions.nemo.flags_tasks import (
    NEMO_TASKS,
    QUESTION_ANSWERING,
    TEXT_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    NemoTask,
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


def test_files_of_a_folder_and_number_of_labels():
    words = ["model.dataset.data_dir=data"]
    assert {"--train-data=data/text_train.txt", "--valid-data=data/text_dev.txt"} <= {
        *nemo_flags(words, TOKEN_CLASSIFICATION, world_size=1)
    }
    words = ["model.dataset.num_classes=3", "model.train_ds.file_path=F"]
    found = nemo_flags(words, TEXT_CLASSIFICATION, world_size=1)
    assert found[0] == "--train-data=F"
    assert "--num-labels=3" in found


def test_names_of_labels_in_a_file(folder):
    (folder / "labels.csv").write_text("no\nyes\n\n")
    word = "model.class_labels.class_labels_file"
    found = nemo_flags([f"{word}=labels.csv"], TEXT_CLASSIFICATION, world_size=1)
    assert found[found.index("--labels") :][:3] == ["--labels", "no", "yes"]
    with problem("cannot read label.csv … labels.csv"):
        nemo_flags([f"{word}=label.csv"], TEXT_CLASSIFICATION, world_size=1)


def test_steps_are_the_length_of_the_schedule():
    found = flags("trainer.max_steps=30", "trainer.max_epochs=3")
    assert {"--train-iters=30", "--lr-decay-iters=30", "--epochs=3"} <= {*found}
    assert not any("iters" in word for word in flags("trainer.max_steps=-1"))
    found = flags("trainer.max_steps=30", "do_training=false", "model.validation_ds.file=V")
    assert not any("iters" in word for word in found)


def test_the_folder_of_a_run_and_the_archive_that_is_evaluated():
    words = ["exp_manager.explicit_log_dir=here", "exp_manager.exp_dir=out"]
    assert "--save=here" in flags(*words)
    assert "--load=a.nemo" in flags("do_training=false", "model.nemo_path=a.nemo")
    assert not any("a.nemo" in word for word in flags("model.nemo_path=a.nemo"))


def test_files_of_predictions_of_a_test_are_those_of_an_evaluation():
    words = ["model.test_ds.file=F", "model.test_ds.output_prediction_file=P"]
    found = nemo_flags([*words, "do_training=false"], QUESTION_ANSWERING, world_size=1)
    assert "--output-prediction-file=P" in found
    found = nemo_flags([words[1]], QUESTION_ANSWERING, world_size=1)
    assert not any("P" in word for word in found)


TRAINER = """\
trainer:
  gpus: 1
  num_nodes: 1
  max_epochs: 5
  max_steps: null
  accumulate_grad_batches: 1
  gradient_clip_val: 0.0
  amp_level: O0
  precision: 32
  accelerator: ddp
  checkpoint_callback: False
  logger: False
  val_check_interval: 1.0
  {log_interval}: 1
  resume_from_checkpoint: null
exp_manager: {{exp_dir: null, name: x, create_checkpoint_callback: true}}
hydra:
  run: {{dir: .}}
  job_logging: {{root: {{handlers: null}}}}
model:
  nemo_path: x.nemo
  tokenizer:
    tokenizer_name: ${{model.language_model.pretrained_model_name}}
    vocab_file: null
    tokenizer_model: null
    special_tokens: null
  optim:
    name: adam
    lr: 5e-5
    weight_decay: 0.0
    sched:
      name: WarmupAnnealing
      warmup_steps: null
      warmup_ratio: 0.1
      last_epoch: -1
      monitor: val_loss
      reduce_on_plateau: false
"""
MODELS = {
    "token-classification": """\
  label_ids: null
  class_labels: {class_labels_file: label_ids.csv}
  dataset: {data_dir: "???", class_balancing: null, max_seq_length: 128, pad_label: O,
            ignore_extra_tokens: false, ignore_start_end: false, use_cache: true, num_workers: 2}
  head: {num_fc_layers: 2, fc_dropout: 0.5, activation: relu, use_transformer_init: true}
  train_ds: {text_file: text_train.txt, labels_file: labels_train.txt, num_samples: -1}
  validation_ds: {text_file: text_dev.txt, labels_file: labels_dev.txt, shuffle: false}
  test_ds: {text_file: text_dev.txt, labels_file: labels_dev.txt, batch_size: 64}
""",
    "text-classification": """\
  classifier_head: {num_output_layers: 2, fc_dropout: 0.1}
  class_labels: {class_labels_file: null}
  dataset: {num_classes: "???", do_lower_case: false, max_seq_length: 256, class_balancing: null}
  train_ds: {file_path: null, batch_size: 64, num_samples: -1, pin_memory: false}
  infer_samples: [a b, c]
""",
    "question-answering": """\
  dataset: {version_2_with_negative: false, doc_stride: 128, max_query_length: 64, use_cache: true,
            max_seq_length: 384, max_answer_length: 30, null_score_diff_threshold: 0.0,
            n_best_size: 20, do_lower_case: true, num_workers: 2, drop_last: false}
  token_classifier: {num_layers: 1, dropout: 0.0, num_classes: 2, activation: relu,
                     log_softmax: false, use_transformer_init: true}
  test_ds: {file: null, output_prediction_file: p.json, output_nbest_file: n.json}
""",
}
SET_HERE = {
    "token-classification": ["model.dataset.data_dir=."],
    "text-classification": [
        *("model.dataset.num_classes=6", "model.train_ds.file_path=train.tsv"),
        *("model.task_name=chemprot", "model.dataset.data_dir=.", "~model.infer_samples"),
    ],
    "question-answering": ["model.train_ds.file=train.json", "+name=QA"],
}


@pytest.mark.parametrize("task", NEMO_TASKS)
def test_files_of_settings_as_nemos_scripts_have_them(task, folder):
    interval = "row_log_interval" if task == "question-answering" else "log_every_n_steps"
    (folder / "run.yaml").write_text(TRAINER.format(log_interval=interval) + MODELS[task])
    network = [f"{MODEL}.lm_checkpoint=iter_0080000", f"{MODEL}.config_file=config.json"]
    name = f"{MODEL}.pretrained_model_name=biomegatron-bert-345m-uncased"
    words = ["--config-name=run", name, *network, *SET_HERE[task]]
    found = nemo_flags(words, NEMO_TASKS[task], world_size=1)
    assert {"--log-interval=1", "--epochs=5", "--lr=5e-5", "--lr-warmup-fraction=0.1"} <= {*found}
    # The name of the network decides, not do_lower_case.
    assert "--tokenizer-type=BertWordPieceLowerCase" in found
    layers = {"question-answering": 1}.get(task, 2)
    assert f"--head-layers={layers}" in found


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
        ("model.head.layers=3", "settings of the head are model.head.activation"),
        ("model.classifier_head.layers=3", "settings of the head are model.head.activation"),
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
