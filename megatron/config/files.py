"""Flags from a YAML file: `--config run.yaml` stands for the flags that the file lists."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.flags import FileWord, switch_words, value_in
from megatron.errors import ConfigError


def with_file_flags(argv: Sequence[str], sections: Mapping[str, type]) -> list[str]:
    """Return `argv` with the flags of its `--config` file put in front, so that later ones win.

    Args:
        sections: what the flags are those of.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds something other than flags.
    """
    file = value_in(argv, "--config")
    return [*(file_flags(Path(file), switch_words(sections)) if file else []), *argv]


def file_flags(
    file: Path, switches: Mapping[str, tuple[list[str], list[str]]] | None = None
) -> list[str]:
    """Return the command line that the YAML `file` stands for.

    Keys are flags without their dashes (underscores are fine), optionally under headings;
    a list gives several values, `true` a flag without value, `false` and `null` nothing. A switch
    that is on by default is turned off by `false`.

    Args:
        switches: what `true` and `false` stand for, by option; see switch_words. Other options
            are left for the parser to refuse.
    """
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        content, lines = yaml.safe_load(text), _lines_of(text)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: expected `flag: value` lines, found {content!r}")
    return [
        FileWord(word, path[-1], f"{file}, line {lines.get(path, 1)}")
        for path, words in _entries(content, switches)
        for word in words
    ]


def _lines_of(text: str) -> dict[tuple[str, ...], int]:
    """Return {keys from the top down: line} of a YAML text."""
    import yaml

    def walk(node: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                path = (*above, str(key.value))
                yield path, key.start_mark.line + 1
                yield from walk(value, path)

    return dict(walk(yaml.compose(text, Loader=yaml.SafeLoader), ()))


def _entries(
    content: dict[Any, Any],
    switches: Mapping[str, tuple[list[str], list[str]]] | None,
    above: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the keys that lead to each flag of a file, and the flag's words."""
    for key, value in content.items():
        path = (*above, str(key))
        option = "--" + str(key)
        if "_" in option and option not in _UNDERSCORED:
            option = option.replace("_", "-")
        if isinstance(value, dict):
            yield from _entries(value, switches, path)
        elif value is True or value is False or value is None:
            on, off = ([option], []) if switches is None else switches.get(option, ([option],) * 2)
            yield path, on if value else off
        elif isinstance(value, list):
            yield path, [option, *map(str, value)]
        else:
            yield path, [f"{option}={value}"]


_UNDERSCORED = {"--deepspeed_config", "--local_rank"}
