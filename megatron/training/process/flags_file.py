"""The flags of a run: a file of all of them, and the non-default ones."""

import time
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, reason
from megatron.config.config import Config, flatten, sections_in
from megatron.config.parsing.flags import options_of

_WIDTH = 48


def write_flags(directory: str, config: dict[str, Any]) -> Path:
    """Write one line for each value of `config` into a new file of `directory`; return the file.

    Args:
        config: as nested dictionaries.

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
        raise ConfigError(f"--log-path {directory}: {reason(error, directory)}") from error
    return file


def given_flags(config: Config) -> dict[str, Any]:
    """Return {flag: value} of each option that differs from its default."""
    sections = sections_in(config)
    options = options_of(sections)
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for section in sections.values()
        for field in fields(section)
    }
    given = flatten(asdict(config))
    return {options[name]: value for name, value in given.items() if value != defaults[name]}
