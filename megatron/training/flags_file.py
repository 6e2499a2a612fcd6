"""A file of all flags and their values, written at each start."""

import time
from pathlib import Path
from typing import Any

from megatron.config.config import flatten
from megatron.errors import ConfigError

_WIDTH = 48


def write_flags(directory: str, config: dict[str, Any]) -> Path:
    """Write one line for each value of `config` into a new file of `directory`; return the file.

    Args:
        config: the wishes, as nested dictionaries.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    file = Path(directory) / time.strftime("args_%Y-%m-%dT%H:%M:%S.txt")
    values = sorted(flatten(config).items(), key=lambda item: item[0].lower())
    lines = [f"  {name} {'.' * (_WIDTH - len(name))} {value}\n" for name, value in values]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--log-path {directory}: {error}") from error
    return file
