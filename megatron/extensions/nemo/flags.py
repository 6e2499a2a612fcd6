"""Settings of NeMo's scripts (KEY=VALUE over YAML) as flags of this program."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, near, raise_if_any, reason
from megatron.config.parsing.parser import FileWord, peek
from megatron.config.parsing.settings import KeyValue, Settings, read_settings, value
from megatron.extensions.nemo.flags_networks import CONFIG_GROUP, language_model_flags
from megatron.extensions.nemo.flags_tasks import (
    CLASS_LABELS,
    COMMON,
    FIXED,
    HEAD_GROUPS,
    NEMO_TASKS,
    ROLES,
    SCHEDULES,
    TRANSLATED,
    WITHOUT_EFFECT,
    NemoTask,
)


def task_flags(argv: Sequence[str], task: str, *, world_size: int) -> list[str]:
    """Return the command line of a text task, by the name of --task: see `nemo_flags`."""
    return nemo_flags(argv, NEMO_TASKS[task], world_size=world_size)


def nemo_flags(argv: Sequence[str], task: NemoTask, *, world_size: int) -> list[str]:
    """Return the command line of flags that the settings in `argv` stand for.

    Flags in `argv` come last, so that they override.

    Raises:
        ConfigError: lists keys that are unknown or have no meaning here, and wrong values.
    """
    settings, flags = read_settings(argv, task.defaults)
    if "pretrained_model" in settings or peek(flags).get("epochs") == "0":
        # The length of samples comes from the network that is evaluated.
        settings = {
            key: setting
            for key, setting in settings.items()
            if (key, setting.location) != ("model.dataset.max_seq_length", "default")
        }
    evaluates = not _trains(settings)
    table = {**COMMON, **task.flags, **(task.test_flags if evaluates else {})}
    files = {f"model.{role}_ds.{task.file}" for role in ROLES}
    known = {*table, *files, task.folder, *TRANSLATED, *task.test_flags, *task.fixed, *task.own}
    raise_if_any(
        [*_key_problems(settings, known), *_fixed_problems(settings, {**FIXED, **task.fixed})]
    )
    words = [
        *_file_words(settings, task),
        *_label_words(settings, task),
        *_table_words(settings, table),
        *_trainer_words(settings, world_size),
        *_optimizer_words(settings),
        *_run_words(settings),
        *language_model_flags(settings),
    ]
    return [*words, *flags]


def _key_problems(settings: Settings, known: set[str]) -> Iterator[str]:
    """Yield each setting of an unknown key."""
    for setting in settings.values():
        key = setting.key
        if key in known or key.startswith((*(f"{k}." for k in WITHOUT_EFFECT), CONFIG_GROUP)):
            continue
        if key in WITHOUT_EFFECT:
            continue
        if inside := [each for each in sorted(known) if each.startswith(f"{key}.")]:
            written = f"{inside[0]}={setting.value}"
            yield f"{setting.location}: {key} is a group of settings: write {written}"
            continue
        yield f"{setting.location}: unknown setting {key}{_hint(key, known)}"


def _hint(key: str, known: set[str]) -> str:
    """Return a hint for an unknown key: a similar key, or the keys of its group."""
    group = key.rpartition(".")[0]
    groups = HEAD_GROUPS if group in HEAD_GROUPS else (group,)
    inside = sorted(each for each in known if each.rpartition(".")[0] in groups)
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.75):
        return f"; did you mean {close[0]}?"
    what = "the head" if group in HEAD_GROUPS else group
    return f"; settings of {what} are {', '.join(inside)}" if inside and group else ""


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


def _trains(settings: Settings) -> bool:
    """Whether the settings are of a training; otherwise a network is evaluated."""
    return bool(value(settings, "do_training", True)) and value(settings, "trainer.max_epochs") != 0


def _file_words(settings: Settings, task: NemoTask) -> Iterator[str]:
    """Yield the flags of training and validation data, or without training of the test data."""
    folder = Path(str(value(settings, task.folder, ""))) if task.folder else Path()
    train, valid, test = (settings.get(f"model.{role}_ds.{task.file}") for role in ROLES)
    trains = _trains(settings)
    if test and trains and not (valid and test.value == valid.value):
        raise ConfigError(
            f"{test.location}: {test.key} is evaluated by itself: train without it first, then write "
            "do_training=false pretrained_model=DIRECTORY"
        )
    for role, each in zip(ROLES, (train, valid, test), strict=True):
        labels = settings.get(f"model.{role}_ds.labels_file")
        expected = str(each.value if each else "").replace("text_", "labels_")
        if labels and str(labels.value) != expected:
            raise ConfigError(
                f"{labels.location}: {labels.key} {labels.value}: labels are next to the text, in "
                f"{expected or 'labels_NAME.txt'}"
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


def _label_words(settings: Settings, task: NemoTask) -> Iterator[str]:
    """Yield the names of labels in a file, one on each line.

    Raises:
        ConfigError: it cannot be read.
    """
    file = settings.get(CLASS_LABELS)
    if file is None or CLASS_LABELS not in task.own:
        return
    path = Path(str(file.value))
    try:
        names = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file.location}: cannot read {path}: {reason(error, path)}{near(path)}"
        ) from error
    yield from _word(file, "--labels", *(name.strip() for name in names if name.strip()))


def _word(setting: KeyValue, *words: str) -> list[str]:
    """Return words that stand for a setting, for messages that name it."""
    return [FileWord(word, setting.key, setting.location) for word in words]


def _table_words(settings: Settings, table: Mapping[str, str]) -> Iterator[str]:
    for key, flag in table.items():
        setting = settings.get(key)
        if setting is None or setting.value is False:
            continue
        if key == "trainer.max_epochs" and not value(settings, "do_training", True):
            continue
        if setting.value is True:
            yield from _word(setting, flag)
        elif isinstance(setting.value, list):
            yield from _word(setting, flag, *map(str, setting.value))
        else:
            yield from _word(setting, f"{flag}={setting.value}")


def _trainer_words(settings: Settings, world_size: int) -> Iterator[str]:
    steps = settings.get("trainer.max_steps")
    if steps is not None and steps.value != -1 and _trains(settings):
        # The schedule of the learning rate has this length, though --epochs may end the run before.
        yield from _word(steps, f"--train-iters={steps.value}", f"--lr-decay-iters={steps.value}")
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


def _optimizer_words(settings: Settings) -> Iterator[str]:
    name, betas = settings.get("model.optim.name"), settings.get("model.optim.betas")
    schedule = settings.get("model.optim.sched.name")
    if name is not None:
        yield from _word(name, f"--optimizer={name.value}")
    if betas is not None:
        if not isinstance(betas.value, list) or len(betas.value) != 2:
            raise ConfigError(f"{betas.location}: {betas.key}: write two numbers, as [0.9,0.999]")
        yield from _word(betas, f"--adam-beta1={betas.value[0]}", f"--adam-beta2={betas.value[1]}")
    if schedule is not None:
        if schedule.value not in SCHEDULES:
            raise ConfigError(
                f"{schedule.location}: {schedule.key} {schedule.value}: known are "
                f"{', '.join(SCHEDULES)}; or leave it out and write --lr-decay-style"
            )
        yield from _word(schedule, f"--lr-decay-style={SCHEDULES[schedule.value]}")


def _run_folder(settings: Settings) -> Path | None:
    """Return the folder of a run: explicit_log_dir, or exp_dir and in it the name of the run."""
    if explicit := value(settings, "exp_manager.explicit_log_dir"):
        return Path(str(explicit))
    folder = value(settings, "exp_manager.exp_dir")
    name = value(settings, "exp_manager.name")
    return Path(str(folder)) / str(name or "") if folder else None


def _run_words(settings: Settings) -> Iterator[str]:
    model, folder = settings.get("pretrained_model"), _run_folder(settings)
    if not _trains(settings):
        model = model or settings.get("model.nemo_path")
    if model is not None:
        yield from _word(model, f"--load={model.value}")
    if folder is None:
        return
    yield f"--save={folder}"
    if model is None and value(settings, "exp_manager.resume_if_exists", False):
        yield f"--load={folder}"
    if value(settings, "exp_manager.create_tensorboard_logger", True):
        yield f"--tensorboard-dir={folder / 'tensorboard'}"
