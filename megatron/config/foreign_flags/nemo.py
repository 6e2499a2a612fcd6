"""Settings of NeMo's scripts (KEY=VALUE over YAML) as flags of this program."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, near, raise_if_any
from megatron.config.parsing.files import read_yaml
from megatron.config.parsing.parser import FileWord, value_in
from megatron.config.parsing.settings import Setting, Settings, read_settings, value

LARGE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
"""The network of 345M parameters."""

_GENERIC = ("megatron-bert-uncased", "megatron-bert-cased")
PRETRAINED: Mapping[str, bool] = {
    name: "uncased" in name
    for name in (
        *("megatron-bert-345m-uncased", "megatron-bert-345m-cased"),
        *("biomegatron-bert-345m-uncased", "biomegatron-bert-345m-cased"),
        *("biomegatron345m_biovocab_30k_uncased", "biomegatron345m_biovocab_30k_cased"),
        *("biomegatron345m_biovocab_50k_uncased", "biomegatron345m_biovocab_50k_cased"),
        *_GENERIC,
    )
}
"""Names of pretrained networks, and whether their tokenizer makes lower case of text."""

_COMMON = {
    "trainer.max_epochs": "--epochs",
    "trainer.max_steps": "--exit-interval",
    "trainer.gradient_clip_val": "--clip-grad",
    "trainer.log_every_n_steps": "--log-interval",
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

_NETWORK = {
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_layers": "--num-layers",
    "num_hidden_layers": "--num-layers",
    "max_position_embeddings": "--max-position-embeddings",
    "max_seq_length": "--max-position-embeddings",
    "intermediate_size": "--ffn-hidden-size",
    "hidden_dropout_prob": "--hidden-dropout",
    "attention_probs_dropout_prob": "--attention-dropout",
}
"""Flags of the network, by their names in a configuration of the language model."""

_SCHEDULES = {
    "WarmupAnnealing": "linear",
    "PolynomialDecayAnnealing": "linear",
    "PolynomialHoldDecayAnnealing": "linear",
    "CosineAnnealing": "cosine",
    "SquareRootAnnealing": "square-root",
    "InverseSquareRootAnnealing": "inverse-square-root",
    "WarmupPolicy": "constant",
}

_WITHOUT_EFFECT = (
    *("trainer.accelerator", "trainer.strategy", "trainer.distributed_backend", "trainer.logger"),
    *("trainer.amp_level", "trainer.checkpoint_callback", "trainer.enable_checkpointing"),
    *("trainer.num_sanity_val_steps", "trainer.benchmark", "trainer.plugins"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.replace_sampler_ddp"),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.profiler"),
    *("exp_manager.create_checkpoint_callback", "exp_manager.checkpoint_callback_params"),
    *("exp_manager.resume_ignore_no_checkpoint", "exp_manager.files_to_copy", "hydra"),
    *("model.tokenizer.special_tokens", "model.tokenizer.tokenizer_model", "model.nemo_path"),
    *("model.optim.sched.last_epoch", "model.optim.sched.monitor", "model.optim.sched.power"),
    *("model.optim.sched.reduce_on_plateau", "model.optim.sched.hold_steps"),
    *("model.dataset.use_cache", "model.dataset.num_workers", "model.dataset.pin_memory"),
    *("model.dataset.drop_last", "model.validation_ds.batch_size", "model.test_ds.batch_size"),
    *(f"model.{role}_ds.{name}" for role in ("train", "validation", "test")
      for name in ("shuffle", "num_workers", "pin_memory", "drop_last", "prefix")),
)  # fmt: skip
"""Keys, or groups of them, whose value changes no result here."""

_ROLES = ("train", "validation", "test")

_FIXED: Mapping[str, Any] = {f"model.{role}_ds.num_samples": -1 for role in _ROLES} | {
    "do_testing": False
}

_TRANSLATED = (
    *("do_training", "pretrained_model", *_FIXED),
    *("trainer.precision", "trainer.accumulate_grad_batches"),
    *("trainer.devices", "trainer.gpus", "trainer.num_nodes"),
    *("exp_manager.exp_dir", "exp_manager.name", "exp_manager.resume_if_exists"),
    "exp_manager.create_tensorboard_logger",
    *("model.optim.name", "model.optim.betas", "model.optim.sched.name"),
    *("model.tokenizer.tokenizer_name", "model.dataset.do_lower_case"),
    *("model.language_model.pretrained_model_name", "model.language_model.lm_checkpoint"),
    "model.language_model.config_file",
)
"""Keys that the functions below translate."""

_CONFIG = "model.language_model.config."


@dataclass(frozen=True, kw_only=True)
class NemoTask:
    """A task by NeMo's settings.

    Args:
        defaults: settings of the task without a file and a word for them.
        flags: flags that take the values of the task's own settings, by key.
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
    own: Sequence[str] = ()


def nemo_flags(argv: Sequence[str], task: NemoTask, *, world_size: int) -> list[str]:
    """Return the command line of flags that the settings in `argv` stand for.

    Flags in `argv` come last, so that they override.

    Raises:
        ConfigError: lists keys that are unknown or have no meaning here, and wrong values.
    """
    settings, flags = read_settings(argv, task.defaults)
    if "pretrained_model" in settings or value_in(flags, "--epochs") == "0":
        # The length of samples is that of the network that is evaluated.
        settings = {
            key: setting
            for key, setting in settings.items()
            if (key, setting.location) != ("model.dataset.max_seq_length", "default")
        }
    table = {**_COMMON, **task.flags}
    files = {f"model.{role}_ds.{task.file}" for role in _ROLES}
    known = {*table, *files, task.folder, *_TRANSLATED, *task.fixed, *task.own}
    raise_if_any(
        [*_key_problems(settings, known), *_fixed_problems(settings, {**_FIXED, **task.fixed})]
    )
    words = [
        *_of_files(settings, task),
        *_of_labels(settings),
        *_of_table(settings, table),
        *_of_trainer(settings, world_size),
        *_of_optimizer(settings),
        *_of_run(settings),
        *_of_language_model(settings),
    ]
    return [*words, *flags]


def _key_problems(settings: Settings, known: set[str]) -> Iterator[str]:
    """Yield each setting of an unknown key."""
    for setting in settings.values():
        key = setting.key
        if key in known or key.startswith((*(f"{k}." for k in _WITHOUT_EFFECT), _CONFIG)):
            continue
        if key in _WITHOUT_EFFECT:
            continue
        if inside := [each for each in sorted(known) if each.startswith(f"{key}.")]:
            written = f"{inside[0]}={setting.value}"
            yield f"{setting.location}: {key} is a group of settings: write {written}"
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"{setting.location}: unknown setting {key}{hint}"


def _fixed_problems(settings: Settings, fixed: Mapping[str, Any]) -> Iterator[str]:
    """Yield each setting with another value than the only one that is possible."""
    for key, only in fixed.items():
        setting = settings.get(key)
        if setting is not None and setting.value != only:
            yield f"{setting.location}: {key} can be {_yaml(only)} only, not {_yaml(setting.value)}"


def _yaml(value: Any) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )


def _of_files(settings: Settings, task: NemoTask) -> Iterator[str]:
    """Yield the flags of training and validation data; without training those of the test data."""
    folder = Path(str(value(settings, task.folder, ""))) if task.folder else Path()
    train, valid, test = (settings.get(f"model.{role}_ds.{task.file}") for role in _ROLES)
    trains = value(settings, "do_training", True) and value(settings, "trainer.max_epochs") != 0
    if test and trains:
        raise ConfigError(
            f"{test.location}: {test.key} is evaluated by itself: train without it first, then write "
            "do_training=false pretrained_model=DIRECTORY"
        )
    if task.folder and task.folder not in settings:
        # Defaults name files of that folder.
        train, valid, test = (
            setting and (None if setting.location == "default" else setting)
            for setting in (train, valid, test)
        )
    if trains and train:
        yield from _word(train, f"--train-data={folder / str(train.value)}")
    if evaluated := (None if trains else test) or valid:
        yield from _word(evaluated, f"--valid-data={folder / str(evaluated.value)}")
    if not trains:
        yield "--epochs=0"


def _of_labels(settings: Settings) -> Iterator[str]:
    """Yield the names of labels that are numbers."""
    classes = settings.get("model.dataset.num_classes")
    if classes is not None:
        if not isinstance(classes.value, int) or classes.value < 2:
            raise ConfigError(f"{classes.location}: {classes.key} must be at least 2")
        yield from _word(classes, "--labels", *map(str, range(classes.value)))


def _word(setting: Setting, *words: str) -> list[str]:
    """Return words that stand for a setting, for messages that name it."""
    return [FileWord(word, setting.key, setting.location) for word in words]


def _of_table(settings: Settings, table: Mapping[str, str]) -> Iterator[str]:
    for key, flag in table.items():
        setting = settings.get(key)
        if setting is None or setting.value is False:
            continue
        if key == "trainer.max_epochs" and not value(settings, "do_training", True):
            continue
        if key == "trainer.max_steps" and setting.value == -1:
            continue
        if setting.value is True:
            yield from _word(setting, flag)
        elif isinstance(setting.value, list):
            yield from _word(setting, flag, *map(str, setting.value))
        else:
            yield from _word(setting, f"{flag}={setting.value}")


def _of_trainer(settings: Settings, world_size: int) -> Iterator[str]:
    precision = settings.get("trainer.precision")
    if precision is not None:
        dtype = str(precision.value).removesuffix("-mixed").removesuffix("-true")
        if dtype not in _DTYPES:
            raise ConfigError(
                f"{precision.location}: trainer.precision {precision.value}: write 32, 16 or bf16"
            )
        yield from _word(precision, *_DTYPES[dtype])
    devices = value(settings, "trainer.devices", value(settings, "trainer.gpus", 1))
    devices = len(devices) if isinstance(devices, list) else devices
    nodes = value(settings, "trainer.num_nodes", 1)
    wanted = devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else 0
    if wanted > 1 and wanted != world_size:
        raise ConfigError(
            f"trainer.devices={devices} trainer.num_nodes={nodes}: {world_size} processes were "
            f"started; start {wanted} with a launcher, such as deepspeed --num_gpus {devices}"
        )
    accumulated = settings.get("trainer.accumulate_grad_batches")
    size = value(settings, "model.train_ds.batch_size")
    if accumulated is not None and isinstance(size, int) and accumulated.value not in (0, 1):
        replicas = world_size // (
            value(settings, "model.tensor_model_parallel_size", 1)
            * value(settings, "model.pipeline_model_parallel_size", 1)
        )
        samples = int(accumulated.value) * size * replicas
        yield from _word(accumulated, f"--global-batch-size={samples}")


_DTYPES: Mapping[str, tuple[str, ...]] = {
    "32": (),
    "16": ("--fp16",),
    "bf16": ("--bf16",),
}


def _of_optimizer(settings: Settings) -> Iterator[str]:
    name, betas = settings.get("model.optim.name"), settings.get("model.optim.betas")
    schedule = settings.get("model.optim.sched.name")
    if name is not None:
        yield from _word(name, f"--optimizer={name.value}")
    if betas is not None:
        if not isinstance(betas.value, list) or len(betas.value) != 2:
            raise ConfigError(f"{betas.location}: {betas.key}: write two numbers, as [0.9,0.999]")
        yield from _word(betas, f"--adam-beta1={betas.value[0]}", f"--adam-beta2={betas.value[1]}")
    if schedule is not None:
        if schedule.value not in _SCHEDULES:
            raise ConfigError(
                f"{schedule.location}: {schedule.key} {schedule.value}: known are "
                f"{', '.join(_SCHEDULES)}; or leave it out and write --lr-decay-style"
            )
        yield from _word(schedule, f"--lr-decay-style={_SCHEDULES[schedule.value]}")


def _run_folder(settings: Settings) -> Path | None:
    """Return the folder of a run: exp_manager.exp_dir, and in it exp_manager.name."""
    folder = value(settings, "exp_manager.exp_dir")
    name = value(settings, "exp_manager.name")
    return Path(str(folder)) / str(name or "") if folder else None


def _of_run(settings: Settings) -> Iterator[str]:
    model, folder = settings.get("pretrained_model"), _run_folder(settings)
    if model is not None:
        yield from _word(model, f"--load={model.value}")
    if folder is None:
        return
    yield f"--save={folder}"
    if model is None and value(settings, "exp_manager.resume_if_exists", False):
        yield f"--load={folder}"
    if value(settings, "exp_manager.create_tensorboard_logger", True):
        yield f"--tensorboard-dir={folder / 'tensorboard'}"


def _of_language_model(settings: Settings) -> Iterator[str]:
    """Yield the flags of the pretrained network, its sizes and its tokenizer."""
    name = value(settings, "model.language_model.pretrained_model_name")
    checkpoint = value(settings, "model.language_model.lm_checkpoint")
    folder = _folder_of(name)
    config = _language_model_config(settings)
    if name is not None and name not in PRETRAINED and folder is None:
        raise ConfigError(
            f"model.language_model.pretrained_model_name={name}: there is no such folder, and known "
            f"names are {', '.join(PRETRAINED)}{near(Path(str(name)))}"
        )
    if name in _GENERIC and folder is None and (checkpoint is None or not config):
        raise ConfigError(
            f"model.language_model.pretrained_model_name={name} needs "
            "model.language_model.lm_checkpoint and model.language_model.config_file"
        )
    if name in PRETRAINED and folder is None and checkpoint is None:
        raise ConfigError(
            f"model.language_model.pretrained_model_name={name}: nothing is downloaded; put the "
            f"files into a folder {name}, or give model.language_model.lm_checkpoint and "
            "model.tokenizer.vocab_file"
        )
    source = checkpoint or folder
    if source is not None:
        if not Path(str(source)).exists():
            raise ConfigError(
                f"model.language_model.lm_checkpoint={source}: there is no such file or "
                f"directory{near(Path(str(source)))}"
            )
        yield f"--pretrained-checkpoint={source}"
    if name in PRETRAINED and name not in _GENERIC:
        config = {**{_NETWORK[key]: size for key, size in LARGE.items()}, **config}
        config.setdefault("--max-position-embeddings", 512)
    yield from (f"{flag}={size}" for flag, size in config.items())
    yield from _of_tokenizer(settings, name, folder)


def _folder_of(name: Any) -> Path | None:
    """Return the local folder of a pretrained network; None if there is none."""
    return Path(name) if isinstance(name, str) and Path(name).is_dir() else None


def _language_model_config(settings: Settings) -> dict[str, Any]:
    """Return flags of the network with their values: of the file, else of the settings.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown.
    """
    file = settings.get("model.language_model.config_file")
    if file is None:
        found = {
            key.removeprefix(_CONFIG): setting.value
            for key, setting in settings.items()
            if key.startswith(_CONFIG)
        }
        where = "model.language_model.config"
    else:
        content, _ = read_yaml(Path(str(file.value)), "model.language_model.config_file")
        where = f"model.language_model.config_file {file.value}"
        if not isinstance(content, dict):
            raise ConfigError(f"{where}: expected names and sizes, found {content!r}")
        found = content
    named = {str(key).replace("-", "_"): size for key, size in found.items()}
    raise_if_any(
        f"{where}: unknown key {key}; known are {', '.join(_NETWORK)}"
        for key in named
        if key not in _NETWORK
    )
    return {_NETWORK[key]: size for key, size in named.items() if size is not None}


def _of_tokenizer(settings: Settings, name: Any, folder: Path | None) -> Iterator[str]:
    """Yield the type of the tokenizer, and its vocabulary in the folder of the network."""
    tokenizer = value(settings, "model.tokenizer.tokenizer_name", name)
    lower = value(settings, "model.dataset.do_lower_case")
    by_name = re.search(r"(?<!un)cased|uncased", str(tokenizer or ""))
    if lower is None and by_name:
        lower = by_name[0] == "uncased"
    if lower is not None:
        yield f"--tokenizer-type=BertWordPiece{'LowerCase' if lower else 'Case'}"
    if folder is not None and "model.tokenizer.vocab_file" not in settings:
        vocabulary = folder / "vocab.txt"
        if vocabulary.is_file():
            yield f"--vocab-file={vocabulary}"


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
        "model.class_labels.class_labels_file": "label_ids.csv",
    },
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
    flags={},
    fixed={
        "model.classifier_head.num_output_layers": 2,
        "model.classifier_head.fc_dropout": 0.1,
        "model.dataset.class_balancing": None,
    },
    own=("model.dataset.num_classes",),
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
    fixed={
        "model.token_classifier.activation": "relu",
        "model.token_classifier.log_softmax": False,
        "model.token_classifier.use_transformer_init": True,
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
