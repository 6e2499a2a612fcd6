"""Settings in place of flags: KEY=VALUE words over a YAML file with nested keys (Hydra)."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, near, raise_if_any
from megatron.config.parsing.files import parse_yaml, read_yaml
from megatron.config.parsing.parser import peek

_WORD = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_]\w*(\.\w[\w-]*)*)(=(?P<value>.*))?", re.S)
_REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
_PATH, _NAME = "--config-path", "--config-name"


@dataclass(frozen=True)
class KeyValue:
    """A value with its dotted key."""

    key: str
    value: Any
    location: str  # the file and the line, or the word, for messages


Settings = Mapping[str, KeyValue]
"""Settings by dotted key."""


def read_settings(argv: Sequence[str], defaults: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Return the settings of a command line, and its other words, which are flags.

    KEY=VALUE, +KEY=VALUE and ++KEY=VALUE set a value, ~KEY removes one. They override the YAML file
    that --config-path DIR and --config-name NAME name, and that overrides `defaults`. ${KEY} stands
    for another setting. A value of null, or ??? in a file, is none.

    Raises:
        ConfigError: the file is missing or is not YAML, or a reference leads nowhere.
    """
    found = {key: KeyValue(key, value, "default") for key, value in defaults.items()}
    words, file = _without_config_name(argv)
    if file:
        found |= {setting.key: setting for setting in _settings_of_file(file)}
    flags: list[str] = []
    for word in words:
        match = _WORD.fullmatch(word)
        if not match or (match["value"] is None and match["sign"] != "~"):
            flags.append(word)
            continue
        key = match["key"]
        # A group is replaced by the value that is set in its place.
        below = [each for each in found if each == key or each.startswith(f"{key}.")]
        entries = {} if match["sign"] == "~" else _flat(key, _parse_word(match["value"]))
        if not entries or key in entries:
            found = {name: value for name, value in found.items() if name not in below}
        found |= {name: KeyValue(name, value, word) for name, value in entries.items()}
    return _resolve_references(found), flags


def _without_config_name(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return `argv` without --config-path and --config-name, and the file that they name.

    Raises:
        ConfigError: there is no such file.
    """
    given = peek(argv)
    name, folder = given.get("config_name"), given.get("config_path")
    words = list(argv)
    for option in (_PATH, _NAME):
        for index, word in reversed([*enumerate(words)]):
            if word.partition("=")[0] == option:
                del words[index : index + (1 if "=" in word else 2)]
    if name is None:
        raise_if_any([f"{_PATH} {folder} needs {_NAME}"] if folder else [])
        return words, None
    file = Path(folder or ".") / name
    if file.suffix not in (".yaml", ".yml"):
        file = file.with_name(f"{file.name}.yaml")
    if not file.is_file():
        raise ConfigError(f"{_NAME} {name}: there is no file {file}{near(file)}")
    return words, file


def _settings_of_file(file: Path) -> Iterator[KeyValue]:
    """Yield the settings of a YAML file."""
    content, lines = read_yaml(file, _NAME)
    if not isinstance(content, dict):
        raise ConfigError(f"{_NAME} {file}: expected `key: value` lines, found {content!r}")
    for name, value in content.items():
        for key, each in _flat(str(name), value).items():
            yield KeyValue(key, each, f"{file}, line {lines.get(tuple(key.split('.')), 1)}")


def _flat(key: str, value: Any) -> dict[str, Any]:
    """Return the values below `key` by dotted key."""
    if not isinstance(value, dict):
        return {key: value}
    return {
        name: each
        for inner, below in value.items()
        for name, each in _flat(f"{key}.{inner}", below).items()
    }


def _parse_word(text: str) -> Any:
    """Return the value of a word, by the rules of YAML."""
    try:
        return parse_yaml(text) if text else None
    except ValueError:
        return text  # such as a path with a colon


def _resolve_references(found: Mapping[str, KeyValue]) -> Settings:
    """Return the settings that have a value, with references replaced.

    Raises:
        ConfigError: a reference names no setting, or itself.
    """

    def value_of(setting: KeyValue, above: Sequence[str] = ()) -> Any:
        if not isinstance(setting.value, str):
            return setting.value
        value: Any = setting.value
        for name in _REFERENCE.findall(setting.value):
            if name not in found or name in (setting.key, *above):
                raise ConfigError(
                    f"{setting.location}: {setting.key}: ${{{name}}} names no other setting"
                )
            other = value_of(found[name], (setting.key, *above))
            whole = value == f"${{{name}}}"
            value = other if whole else str(value).replace(f"${{{name}}}", str(other))
        return value

    values = {key: value_of(setting) for key, setting in found.items()}
    return {
        key: KeyValue(key, value, found[key].location)
        for key, value in values.items()
        if value is not None and value != "???"
    }


def value(settings: Settings, key: str, default: Any = None) -> Any:
    """Return the value of a setting, or `default`."""
    return settings[key].value if key in settings else default


def rest(settings: Settings, used: Iterable[str]) -> list[KeyValue]:
    """Return the settings whose keys are not in `used`."""
    names = frozenset(used)
    return [setting for setting in settings.values() if setting.key not in names]
