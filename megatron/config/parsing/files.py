"""Flags from YAML files: `--config run.yaml`, and `--preset NAME` of a known network."""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.extensions import extension_sections
from megatron.config.parsing.flags import switch_words
from megatron.config.parsing.near_misses import plain
from megatron.config.parsing.parser import OFF, FileWord, peek

Values = Mapping[str, Any]
"""Values of settings by field, as a file of flags holds them; a dictionary groups some."""

Switches = Callable[[str], tuple[list[str], list[str]]]
"""Function of an option with hyphens: the words that stand for "on" and for "off" in a file of flags."""

_VOCABULARY = "vocabulary"  # the key of a preset that is no flag


def with_file_flags(argv: Sequence[str], sections: Mapping[str, type]) -> list[str]:
    """Return `argv` with the flags of its `--config` file in front, so that later ones win.

    Flags of a `--preset`, which the file may name too, come first.

    Args:
        sections: which the flags belong to.

    Raises:
        ConfigError: a file is missing, is not YAML, or holds something other than flags.
    """
    file = peek(argv).get("config")
    words = [*(_words_of(Path(file), sections) if file else []), *argv]
    preset = peek(words).get("preset")
    network = _words_of(preset_file(preset), sections) if preset else []
    return [*(word for word in network if word.key != _VOCABULARY), *words]


def overridden(argv: Sequence[str], sections: Mapping[str, type]) -> Iterator[str]:
    """Yield a notice for each file of `argv` that names the flags which override its own.

    Args:
        sections: which the flags belong to.
    """
    words = with_file_flags(argv, sections)
    now, config, preset = _values_of(words), peek(argv).get("config"), peek(words).get("preset")
    files = {
        **({f"--preset {preset}": preset_file(preset)} if preset else {}),
        **({f"--config {config}": Path(config)} if config else {}),
    }
    for flag, file in files.items():
        then = _values_of(_words_of(file, sections))
        if changed := [name for name in then if name in now and now[name] != then[name]]:
            values = (
                f"{name} {' '.join(now[name])} (not {' '.join(then[name])})" for name in changed
            )
            yield f"{flag} is overridden: {', '.join(values)}"


def _values_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the words after each option, of its last occurrence."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            values = found[plain(option)] = [value] if equals else []
        else:
            values.append(word)
    return found


def preset_vocabulary(name: str) -> int:
    """Return the vocabulary size of a network by name, for plans: in training the tokenizer has it."""
    content, _ = read_yaml(preset_file(name), "--preset")
    size: int = content[_VOCABULARY]
    return size


def _words_of(file: Path, sections: Mapping[str, type]) -> list[FileWord]:
    return file_flags(file, _switches(sections))


def _switches(sections: Mapping[str, type]) -> Switches:
    """Return a function from a switch to its words, of these sections or else of extensions."""
    known = switch_words(sections)

    def words(option: str) -> tuple[list[str], list[str]]:
        found = known.get(option) or switch_words(extension_sections()).get(option)
        # The parser refuses them, except flags of other systems that are off.
        return found or ([option], [f"{option}={OFF}"])

    return words


def preset_file(name: str) -> Path:
    """Return the YAML file of a network, such as llama-3-8b.

    Raises:
        ConfigError: there is none of this name.
    """
    # In the repository; in an installed package (see setup.py).
    root = Path(__file__).resolve().parents[3]
    folders = (root / "examples" / "models", root / "megatron_models")
    files = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    if name not in files:
        if not files:
            raise ConfigError(
                f"--preset {name}: this installation has no networks by name: install the package again"
            )
        near = difflib.get_close_matches(name, files, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(files)}"
        raise ConfigError(f"--preset {name}: there is no such network; {hint}")
    return files[name]


def file_flags(file: Path, switches: Switches | None = None) -> list[FileWord]:
    """Return the command line that the YAML `file` stands for.

    Keys are flags, with or without their dashes (underscores are fine), optionally under headings;
    a list gives several values, `true` a flag without value, `false` and `null` nothing. A switch
    that is on by default is turned off by `false`.

    Args:
        switches: what `true` and `false` stand for; without it `true` is the option.
    """
    content, lines = read_yaml(file, "--config")
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: expected `flag: value` lines, found {content!r}")
    words = [
        FileWord(word, path[-1], f"{file}, line {lines.get(path, 1)}")
        for path, words in _entries(content, switches)
        for word in words
    ]
    raise_if_any(
        f"{word.location}: {word.key}: {variable[0]} is not expanded in a file: write its value"
        for word in words
        if (variable := _VARIABLE.search(word))
    )
    return words


def read_yaml(file: Path, option: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Return the content of a YAML or JSON file, and {keys from the top down: line}.

    Args:
        option: that names the file, for messages.

    Raises:
        ConfigError: the file is missing, or is not YAML.
    """
    import yaml

    try:
        return _content_and_lines(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{option} {file} is not YAML: {where}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{option} {file} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{option} {file}: its values are nested too deeply") from error


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: it is not YAML, or too large; see `read_yaml`.
    """
    import yaml

    try:
        return _content_and_lines(text)[0]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def flag_words(flags: Values, sections: Mapping[str, type]) -> list[str]:
    """Return the command line that a dictionary stands for, by the rules of a file of flags."""
    entries = _entries(dict(flags), _switches(sections))
    return [word for _, words in entries for word in words]


def _content_and_lines(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Parse YAML `text`; return its content and {keys from the top down: line}.

    Raises:
        ValueError: it has too many keys, or its aliases stand for too much: a few hundred bytes can
            stand for terabytes.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        num_keys = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if index is None and isinstance(parent, yaml.MappingNode):
                self.num_keys += 1
                if self.num_keys > _MOST_KEYS:
                    raise ValueError(f"it has more than {_MOST_KEYS} keys")
            return super().compose_node(parent, index)

    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        sizes: dict[int, float] = {}
        expanded = _expanded_size(node, sizes)
        if expanded > max(len(sizes), _MOST_VALUES):
            raise ValueError(
                f"its aliases (*name) stand for more than {_MOST_VALUES} values, or for themselves"
            )
        _require_single_keys(node, set())
        content = loader.construct_document(node)  # which expands merges, in the node too
        return content, dict(_lines_of(node, ()))
    finally:
        loader.dispose()


def _expanded_size(node: Any, sizes: dict[int, float]) -> float:
    """Return the number of values in `node` with its aliases expanded, which may be infinite.

    Args:
        sizes: that number of each node that was counted, by its id; filled in here.
    """
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # to be met again below itself
        children = node.value if isinstance(node.value, list) else ()
        pairs = (child if isinstance(child, tuple) else (child,) for child in children)
        sizes[id(node)] = 1 + sum(_expanded_size(each, sizes) for pair in pairs for each in pair)
    return sizes[id(node)]


def _require_single_keys(node: Any, seen: set[int]) -> None:
    """Raise an error for a key that stands twice in one mapping; YAML's readers take the last."""
    import yaml

    if id(node) in seen or not isinstance(node.value, list):
        return
    seen.add(id(node))
    first: dict[str, int] = {}
    for child in node.value:
        for each in child if isinstance(child, tuple) else (child,):
            _require_single_keys(each, seen)
        if isinstance(child, tuple) and isinstance(child[0], yaml.ScalarNode):
            key, line = child[0].value, child[0].start_mark.line + 1
            if first.setdefault(key, line) != line:
                raise yaml.MarkedYAMLError(
                    problem=f"{key} stands twice, first in line {first[key]}",
                    problem_mark=child[0].start_mark,
                )


def _lines_of(node: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield keys from the top down, and the line of the last."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _lines_of(value, path)


def _entries(
    content: dict[Any, Any], switches: Switches | None, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the keys that lead to each flag of a file, and the flag's words."""
    for key, value in content.items():
        path = (*above, str(key))
        option = plain(f"--{str(key).removeprefix('--')}")
        if isinstance(value, dict):
            yield from _entries(value, switches, path)
        elif value is True or value is False or value is None:
            on, off = switches(option) if switches else ([option], [])
            yield path, on if value else off
        elif isinstance(value, list):
            yield path, [option, *map(str, value)]
        else:
            yield path, [f"{option}={value}"]


_VARIABLE = re.compile(r"\$\{\w+\}")

_MOST_KEYS = 5000
"""Keys of a file, at all levels; there are fewer than a thousand flags."""

_MOST_VALUES = 100_000
"""Values that a file with aliases may stand for; without aliases it may have any number."""
