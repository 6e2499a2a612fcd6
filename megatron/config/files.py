"""Flags from a YAML file: `--config run.yaml` stands for the flags that the file lists."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.config.flags import value_in
from megatron.errors import ConfigError


def with_file_flags(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the flags of its `--config` file put in front, so that later ones win.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds something other than flags.
    """
    file = value_in(argv, "--config")
    return [*(file_flags(Path(file)) if file else []), *argv]


def file_flags(file: Path) -> list[str]:
    """Return the command line that the YAML `file` stands for.

    Keys are flags without their dashes (underscores are fine), optionally under headings;
    a list gives several values, `true` a flag without value, `false` and `null` nothing.
    """
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: expected `flag: value` lines, found {content!r}")
    return list(_words(content))


def _words(content: dict[Any, Any]) -> Iterator[str]:
    for key, value in content.items():
        option = "--" + str(key)
        if "_" in option and option not in _UNDERSCORED:
            option = option.replace("_", "-")
        if isinstance(value, dict):
            yield from _words(value)
        elif value is True:
            yield option
        elif isinstance(value, list):
            yield option
            yield from map(str, value)
        elif value is not False and value is not None:
            yield f"{option}={value}"


_UNDERSCORED = {"--deepspeed_config", "--local_rank"}
