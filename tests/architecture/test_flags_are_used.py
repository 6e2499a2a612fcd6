"""Every flag has a meaning: a help text, a name of its own, and somebody who reads it."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from scripts import PROGRAMS
from source import PACKAGE, REPOSITORY, SCRIPTS, files_of, module_name

from megatron.config.config import SECTIONS
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.parsing.declaration import Flag, copied_settings, flags_of
from megatron.config.parsing.flags import field_docstrings

ALL_SECTIONS = sorted(
    {section for sections in PROGRAMS.values() for section in sections},
    key=str,
)
START_CONFIG = ("Start", "config")
READ_AND_DECIDED = {
    "ModelConfig.attention_bias: <class 'bool'>",
    "ModelConfig.init_method_xavier_uniform: typing.Literal['normal', 'xavier_uniform']",
    "ModelConfig.window_attn_skip_freq: tuple[int, ...]",
    "RetroConfig.retro_add_retriever: tuple[int, ...]",
    "TrainingConfig.skip_train_iteration_range: tuple[tuple[int, int], ...]",
}
"""Settings of decisions that are always made of them, and never copy them."""
READ_BEFORE_PARSING = {
    ("TrainingConfig", "config"),
    ("TrainingConfig", "preset"),
    ("PluginModulesConfig", "plugin"),
}
KEPT_FOR_TRAINING = {
    ("RetroPreprocessingConfig", "retro_gpt_eval_interval"),
    ("RetroPreprocessingConfig", "retro_gpt_eval_iters"),
}
"""Settings of a project that its preprocessing has no use for: they are those of training."""


def fields_read(file: Path) -> set[tuple[str, str]]:
    """Return (section class, field) for every read of a field that `file` contains.

    A section is known by the annotation of a parameter or variable, as an attribute of what is
    annotated Config, or as what `Config.section` returns.
    """
    found = set()
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            found |= _read_in(function)
    return found


def _read_in(function: ast.FunctionDef) -> set[tuple[str, str]]:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    types = {a.arg: a.annotation.id for a in arguments if isinstance(a.annotation, ast.Name)}

    def type_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return types.get(node.id)
        if isinstance(node, ast.Attribute) and (type_of(node.value), node.attr) == START_CONFIG:
            return "Config"
        if isinstance(node, ast.Attribute) and type_of(node.value) == "Config":
            section = SECTIONS.get(node.attr)
            return section.__name__ if section else None
        match node:
            case ast.Call(func=ast.Attribute(attr="section"), args=[ast.Name(id=name)]):
                return name
        return None

    for node in ast.walk(function):
        named = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if named and isinstance(node.annotation, ast.Name):
            types[node.target.id] = node.annotation.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            types[node.targets[0].id] = type_of(node.value)
    return {
        (section, node.attr)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and (section := type_of(node.value))
    }


def settings_copied(file: Path) -> Iterator[tuple[Any, type, Flag]]:
    """Yield the type of each decision that `resolve` copies in `file`, its section and its flag."""
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = [*function.args.args, *function.args.kwonlyargs]
        types = {a.arg: a.annotation.id for a in arguments if isinstance(a.annotation, ast.Name)}
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "resolve":
                part, path, *sections = call.args
                module = vars(import_module(module_name(file)))
                own = [module[types[each.id]] for each in sections if isinstance(each, ast.Name)]
                if own and isinstance(part, ast.Name) and part.id in module:
                    yield from copied_settings(module[part.id], ast.literal_eval(path), own)


def all_settings_copied() -> list[tuple[Any, type, Flag]]:
    return [*chain.from_iterable(map(settings_copied, files_of("config", "extensions")))]


def test_every_field_is_read():
    readers = [*PACKAGE.rglob("*.py"), *SCRIPTS]
    read = set().union(*map(fields_read, readers)) | READ_BEFORE_PARSING | KEPT_FOR_TRAINING
    read |= {(section.__name__, flag.name) for _, section, flag in all_settings_copied()}
    # `given_keys` and `plan_storage` read those that own a key of DeepSpeed's JSON.
    keys = {
        (each.__name__, f.name)
        for each in SECTIONS.values()
        for f in flags_of(each)
        if f.setting.ds_key
    }
    assert {section for section, _ in keys} == {
        "DeepSpeedConfig",
        "PrecisionConfig",
        "RecomputeConfig",
    }
    read |= keys
    unread = [
        (section.__name__, field.name)
        for section in ALL_SECTIONS
        for field in fields(section)
        # What takes a base of sections reads the fields of all of them.
        if not any((base.__name__, field.name) in read for base in section.__mro__)
    ]
    assert unread == []


def plain_type(hint: Any) -> Any:
    """Return a type as its decision has it: without None, a list as a tuple, names as str."""
    kinds = {*get_args(hint)} - {NoneType} if get_origin(hint) in (Union, UnionType) else {hint}
    (kind,) = kinds
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0])
    if get_origin(kind) is list:
        return tuple[plain_type(get_args(kind)[0]), ...]
    return kind


def test_a_decision_has_the_type_of_the_setting_that_it_copies():
    copied = all_settings_copied()
    assert len(copied) > 100
    differing = {
        f"{section.__name__}.{flag.name}: {decision}"
        for decision, section, flag in copied
        if plain_type(flag.hint) != plain_type(decision)
    }
    assert differing == READ_AND_DECIDED


def test_a_read_is_told_from_one_of_another_section(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "def decide(config: Config, model: ModelConfig, other: Plan):\n"
        "    logging = config.logging\n"
        "    return logging.log_interval, model.num_layers, other.seed, config.data.split\n"
    )
    sections = {"LoggingConfig": "log_interval", "ModelConfig": "num_layers", "DataConfig": "split"}
    assert fields_read(file) & {(s.__name__, f.name) for s in ALL_SECTIONS for f in fields(s)} == {
        *sections.items()
    }


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_its_help_under_it(section):
    documented = {name for name, text in field_docstrings(section).items() if text}
    assert documented == {field.name for field in fields(section)}


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_help_is_sentences(section):
    for name, text in field_docstrings(section).items():
        assert text[0].isupper() or text.split()[0] in ("adam", "sgd"), name
        assert text.endswith("."), name


def test_every_program_is_there():
    assert [name for name in PROGRAMS if not (REPOSITORY / name).is_file()] == []


def test_every_section_is_of_some_program():
    with_flags = [*files_of("config"), *PACKAGE.glob("extensions/**/*flags*.py")]
    defined = {
        value.__name__
        for file in with_flags
        for value in vars(import_module(module_name(file))).values()
        if isinstance(value, type) and is_dataclass(value) and value.__name__.endswith("Config")
    }
    bases = {base for section in ALL_SECTIONS for base in section.__mro__ if is_dataclass(base)}
    assert defined - {"Config"} == {section.__name__ for section in bases}


def test_every_attribute_of_a_section_is_annotated():
    # Without an annotation an attribute is no field: it would have no flag and could not be set.
    bare = [
        f"{file.name}: {node.name}"
        for file in files_of("config", "extensions")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        for statement in node.body
        if isinstance(statement, ast.Assign)
    ]
    assert bare == []


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_sections_are_frozen_keyword_only_and_without_methods(section):
    assert section.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields(section))
    attributes = {name for name in vars(section) if not name.startswith("__")}
    assert attributes <= {field.name for field in fields(section)}


def options_of(section):
    return [option for flag in flags_of(section) for option in flag.options]


@pytest.mark.parametrize("program", PROGRAMS)
def test_names_and_spellings_exist_once(program):
    names = Counter(field.name for section in PROGRAMS[program] for field in fields(section))
    spellings = Counter(option for section in PROGRAMS[program] for option in options_of(section))
    assert [name for name, count in (names + spellings).items() if count > 1] == []


def test_a_flag_of_other_systems_is_none_of_ours():
    ours = {option for section in PROGRAMS["pretrain_gpt.py"] for option in options_of(section)}
    theirs = [flag.option for flag in LEGACY]
    assert ours.isdisjoint(theirs)
    assert len(theirs) == len(set(theirs))


@pytest.mark.parametrize("flag", LEGACY, ids=lambda flag: flag.option)
def test_a_flag_of_other_systems_says_what_to_expect(flag):
    assert len(flag.reason.split()) >= 3
    assert not flag.reason.endswith(".")
