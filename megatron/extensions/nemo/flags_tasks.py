"""Settings of NeMo's scripts, by task, and the flags of this program that take their values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CLASS_LABELS = "model.class_labels.class_labels_file"

HEAD_GROUPS = ("model.head", "model.classifier_head", "model.token_classifier")
"""Groups of settings that describe a head, one for each task."""


@dataclass(frozen=True, kw_only=True)
class NemoTask:
    """A task by NeMo's settings.

    Args:
        defaults: settings of the task without a file and a word for them.
        flags: flags that take the values of task-specific settings, by key.
        test_flags: likewise, without training only.
        fixed: settings that have one value here.
        file: name of the setting that names a file, in the groups of the sets.
        folder: key of the folder that the files are in; "" for none.
        own: further keys.
    """

    defaults: Mapping[str, Any]
    flags: Mapping[str, str]
    fixed: Mapping[str, Any]
    file: str
    folder: str = ""
    test_flags: Mapping[str, str] = field(default_factory=dict)
    own: Sequence[str] = ()


COMMON = {
    "trainer.max_epochs": "--epochs",
    "trainer.gradient_clip_val": "--clip-grad",
    "trainer.log_every_n_steps": "--log-interval",
    "trainer.row_log_interval": "--log-interval",
    "model.tensor_model_parallel_size": "--tensor-model-parallel-size",
    "model.pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "model.train_ds.batch_size": "--micro-batch-size",
    "model.dataset.max_seq_length": "--seq-length",
    "model.tokenizer.vocab_file": "--vocab-file",
    "model.optim.lr": "--lr",
    "model.optim.weight_decay": "--weight-decay",
    "model.optim.sched.warmup_ratio": "--lr-warmup-fraction",
    "model.optim.sched.warmup_steps": "--lr-warmup-iters",
    "model.optim.sched.min_lr": "--min-lr",
    "model.seed": "--seed",
    "seed": "--seed",
}
"""Flags that take the values of settings."""

SCHEDULES = {
    "WarmupAnnealing": "linear",
    "PolynomialDecayAnnealing": "linear",
    "PolynomialHoldDecayAnnealing": "linear",
    "CosineAnnealing": "cosine",
    "SquareRootAnnealing": "square-root",
    "InverseSquareRootAnnealing": "inverse-square-root",
    "WarmupPolicy": "constant",
}
"""Learning-rate schedules by NeMo's names."""

ROLES = ("train", "validation", "test")
"""Sets of data, in the names of their groups."""

FIXED: Mapping[str, Any] = {f"model.{role}_ds.num_samples": -1 for role in ROLES} | {
    "do_testing": False,
    "model.optim.sched.power": 1.0,
    "model.optim.sched.hold_steps": 0,
}
"""Settings that have one value here."""

TRANSLATED = (
    *("do_training", "pretrained_model", *FIXED),
    *("trainer.precision", "trainer.accumulate_grad_batches", "trainer.max_steps"),
    *("trainer.devices", "trainer.gpus", "trainer.num_nodes"),
    *("exp_manager.exp_dir", "exp_manager.name", "exp_manager.resume_if_exists"),
    *("exp_manager.explicit_log_dir", "model.nemo_path"),
    "exp_manager.create_tensorboard_logger",
    *("model.optim.name", "model.optim.betas", "model.optim.sched.name"),
    *("model.tokenizer.tokenizer_name", "model.dataset.do_lower_case"),
    *("model.language_model.pretrained_model_name", "model.language_model.lm_checkpoint"),
    "model.language_model.config_file",
)
"""Keys that the functions below translate."""

WITHOUT_EFFECT = (
    *("trainer.accelerator", "trainer.strategy", "trainer.distributed_backend", "trainer.logger"),
    *("trainer.amp_level", "trainer.checkpoint_callback", "trainer.enable_checkpointing"),
    *("trainer.num_sanity_val_steps", "trainer.benchmark", "trainer.plugins"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.replace_sampler_ddp"),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.profiler"),
    *("exp_manager.create_checkpoint_callback", "exp_manager.checkpoint_callback_params"),
    *("exp_manager.resume_ignore_no_checkpoint", "exp_manager.files_to_copy", "hydra"),
    *("model.tokenizer.special_tokens", "model.tokenizer.tokenizer_model", "name"),
    *("model.optim.sched.last_epoch", "model.optim.sched.monitor"),
    "model.optim.sched.reduce_on_plateau",
    *("model.dataset.use_cache", "model.dataset.num_workers", "model.dataset.pin_memory"),
    *("model.task_name", "model.output_dir", "model.infer_samples", "model.label_ids"),
    *("model.dataset.drop_last", "model.validation_ds.batch_size", "model.test_ds.batch_size"),
    *(f"model.{role}_ds.{name}" for role in ("train", "validation", "test")
      for name in ("shuffle", "num_workers", "pin_memory", "drop_last", "prefix")),
)  # fmt: skip
"""Keys, or groups of them, whose value changes no result here."""

TOKEN_CLASSIFICATION = NemoTask(
    defaults={
        "trainer.max_epochs": 5,
        "model.dataset.max_seq_length": 128,
        "model.train_ds.batch_size": 64,
        "model.train_ds.text_file": "text_train.txt",
        "model.validation_ds.text_file": "text_dev.txt",
        "model.optim.lr": 5e-5,
        "model.optim.weight_decay": 0.0,
        "model.optim.sched.warmup_ratio": 0.1,
    },
    flags={
        "model.dataset.ignore_extra_tokens": "--ignore-extra-tokens",
        "model.dataset.ignore_start_end": "--ignore-start-end",
        "model.dataset.class_balancing": "--class-balancing",
        "model.head.num_fc_layers": "--head-layers",
        "model.head.fc_dropout": "--head-dropout",
    },
    fixed={
        "model.dataset.pad_label": "O",
        "model.head.activation": "relu",
        "model.head.use_transformer_init": True,
        CLASS_LABELS: "label_ids.csv",
    },
    own=[f"model.{role}_ds.labels_file" for role in ROLES],
    folder="model.dataset.data_dir",
    file="text_file",
)

TEXT_CLASSIFICATION = NemoTask(
    defaults={
        "trainer.max_epochs": 5,
        "model.dataset.max_seq_length": 256,
        "model.train_ds.batch_size": 64,
        "model.optim.lr": 2e-5,
        "model.optim.weight_decay": 0.01,
        "model.optim.sched.warmup_ratio": 0.1,
    },
    flags={
        "model.dataset.num_classes": "--num-labels",
        "model.dataset.class_balancing": "--class-balancing",
        "model.classifier_head.num_output_layers": "--head-layers",
        "model.classifier_head.fc_dropout": "--head-dropout",
    },
    fixed={},
    own=(CLASS_LABELS, "model.dataset.data_dir"),
    file="file_path",
)

QUESTION_ANSWERING = NemoTask(
    defaults={
        "trainer.max_epochs": 2,
        "model.dataset.max_seq_length": 384,
        "model.train_ds.batch_size": 24,
        "model.optim.lr": 3e-5,
        "model.optim.weight_decay": 0.0,
        "model.optim.sched.name": "SquareRootAnnealing",
    },
    flags={
        "model.dataset.version_2_with_negative": "--version-2-with-negative",
        "model.dataset.doc_stride": "--doc-stride",
        "model.dataset.max_query_length": "--max-query-length",
        "model.dataset.max_answer_length": "--max-answer-length",
        "model.dataset.n_best_size": "--n-best-size",
        "model.dataset.null_score_diff_threshold": "--null-score-diff-threshold",
        "model.output_prediction_file": "--output-prediction-file",
        "model.output_nbest_file": "--output-nbest-file",
        "model.token_classifier.num_layers": "--head-layers",
        "model.token_classifier.dropout": "--head-dropout",
    },
    test_flags={
        "model.test_ds.output_prediction_file": "--output-prediction-file",
        "model.test_ds.output_nbest_file": "--output-nbest-file",
    },
    fixed={
        "model.token_classifier.activation": "relu",
        "model.token_classifier.log_softmax": False,
        "model.token_classifier.use_transformer_init": True,
        "model.token_classifier.num_classes": 2,
        "model.dataset.keep_doc_spans": "all",
    },
    file="file",
)

NEMO_TASKS = {
    "token-classification": TOKEN_CLASSIFICATION,
    "text-classification": TEXT_CLASSIFICATION,
    "question-answering": QUESTION_ANSWERING,
}
"""NeMo's settings of tasks, by the name of --task."""
