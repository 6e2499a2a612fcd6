"""Extensions: capabilities other than the pretraining of a GPT, each a folder of megatron/extensions.

The folder's name is the extension's; nothing lists them. An extension registers its network,
objectives and formats in the registries that plugins use, and declares its flags in `SECTIONS` of its
`flags.py`; docs/architecture.md lists what else. Its modules that need no torch are imported when a
program, a flag or a checkpoint needs them; a folder that is taken away takes its capability with it,
and nothing else.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = "megatron.extensions"
_FOLDER = Path(__file__).resolve().parents[1] / "extensions"
_WITHOUT_TORCH = ("flags", "declarations", "network")
"""Modules that are imported when an extension is needed, if it has them."""


@cache
def extension_names() -> tuple[str, ...]:
    """Return the names of all extensions of this installation."""
    return tuple(sorted(file.parent.name for file in _FOLDER.glob("*/__init__.py")))


def load_extension(name: str) -> None:
    """Import what an extension registers."""
    for module in _WITHOUT_TORCH:
        if (_FOLDER / name / f"{module}.py").is_file():
            import_module(f"{PACKAGE}.{name}.{module}")


def extension_of(module: str) -> str:
    """Return the extension that a module lies in; "" for one of the core or of a plugin."""
    inside = module.removeprefix(f"{PACKAGE}.")
    return "" if inside == module else inside.partition(".")[0]


def owners(sections: Iterable[type]) -> list[str]:
    """Return the extensions in which these sections of flags are defined."""
    found = dict.fromkeys(extension_of(each.__module__) for each in sections)
    return [name for name in found if name]


@cache
def sections_of(name: str) -> Mapping[str, type]:
    """Return the sections of flags that an extension brings to a run, by name."""
    found: Mapping[str, type] = _declaration(name, "flags", "SECTIONS") or {}
    return found


def declarations_in(
    module: str, name: str, extensions: Iterable[str] | None = None
) -> Iterator[Any]:
    """Yield what extensions declare by a name in their module of another, one extension after the other.

    Names in `flags.py` are:
        settings_of: function from values by field, saved or given, to settings of files that flags name,
            None without; they have `defaults`, values by field, and `contradictions`, a function from
            the values of all flags to messages.
        needs_complete_run: function from a Config to whether samples are numbered as in training,
            though the run only evaluates.
        OF_NETWORK: names of sections that --use-checkpoint-args reads.

    Args:
        extensions: names of the extensions to look at; None: all.
    """
    names = extension_names() if extensions is None else extensions
    found = (_declaration(extension, module, name) for extension in names)
    return (each for each in found if each is not None)


def _declaration(extension: str, module: str, name: str) -> Any:
    """Return what an extension declares by `name` in one of its modules; None if it has none."""
    if not (_FOLDER / extension / f"{module}.py").is_file():
        return None
    return getattr(import_module(f"{PACKAGE}.{extension}.{module}"), name, None)


def extension_sections(names: Iterable[str] | None = None) -> dict[str, type]:
    """Return the sections of flags of several extensions, of all if `names` is None."""
    extensions = extension_names() if names is None else names
    return {section: kind for name in extensions for section, kind in sections_of(name).items()}


def extensions_with(sections: Iterable[str]) -> list[str]:
    """Return the extensions that have sections of these names, without names that none has."""
    wanted = set(sections)
    names = extension_names() if wanted else ()
    return [name for name in names if wanted & sections_of(name).keys()]


def used_sections(config_sections: Mapping[str, Any]) -> set[str]:
    """Return the names of a saved config's sections: up to version 1.0 all stood at its top."""
    return {*config_sections, *config_sections.get("extensions", {})} - {"extensions"}
