import sys

import pytest
from problems import problem
from scripts import forget_plugin

from megatron.common import registry
from megatron.common.errors import ConfigError
from megatron.common.extensions import load_extension
from megatron.config import plugins
from megatron.config.config import parse_config, parse_config_for_checkpoint, parse_saved_config

NETWORK = [
    *(
        [
            "--num-layers",
            "2",
            "--hidden-size",
            "16",
            "--num-attention-heads",
            "2",
            "--seq-length",
            "16",
        ]
    ),
    *(["--micro-batch-size", "1", "--lr", "0.1"]),
]
MODULE = """
from dataclasses import dataclass

from megatron.common.registry import SCHEDULES
from megatron.optimizer.schedule import lr_decay


@dataclass(frozen=True, kw_only=True)
class StairsConfig:
    '''A learning rate in steps.'''

    stairs: int = 4
    '''Number of steps.'''


@SCHEDULES.register("stairs", flags=StairsConfig)
@lr_decay
def stairs(progress, *, flags):
    return 1 - int(progress * flags.stairs) / flags.stairs
"""


@pytest.fixture
def stairs(tmp_path, monkeypatch):
    """A plugin that nothing remembers behind the test; its module's name."""
    (tmp_path / "stairs_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "stairs_plugin"
    forget_plugin("stairs_plugin", registry.SCHEDULES, "stairs")


def parse(*words):
    return parse_config([*NETWORK, *words])[0]


def test_a_name_and_a_flag_of_a_plugin(stairs):
    config = parse("--lr-decay-style", "stairs", "--stairs", "8", "--plugin", stairs)
    assert config.schedule.lr_decay_style == "stairs"
    assert config.extensions["StairsConfig"].stairs == 8
    assert config.plugins.plugin == [stairs]


def test_plugins_in_a_file_of_flags(stairs, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"plugin: [{stairs}]\nstairs: 2\nlr_decay_style: stairs\n")
    config = parse("--config", str(file))
    assert config.extensions["StairsConfig"].stairs == 2


@pytest.mark.parametrize(
    "words", ["--plugin json stairs_plugin", "--plugin=json --plugin stairs_plugin"]
)
def test_several_plugins(stairs, words):
    config = parse(*words.split())
    assert config.plugins.plugin == ["json", stairs]
    assert "StairsConfig" in config.extensions


def test_without_the_plugin_its_name_is_refused_with_a_hint():
    with pytest.raises(ConfigError) as error:
        parse("--lr-decay-style", "cosin")
    for part in ("--lr-decay-style cosin", "did you mean cosine?", "WSD", "--plugin"):
        assert part in str(error.value)


def test_a_hook_of_flags_is_no_hook_by_name():
    load_extension("chaos")
    with problem("--hook chaos"):
        parse("--hook", "chaos")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("import no_such_module_of_mine", "no_such_module_of_mine"),
        ("\n1 / 0", "ZeroDivisionError: division by zero … broken_plugin.py, line 2"),
        ("def", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_plugin_that_cannot_be_imported(tmp_path, monkeypatch, content, says):
    (tmp_path / "broken_plugin.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with problem(says) as error:
        parse("--plugin", "broken_plugin")
    assert "--plugin broken_plugin" in str(error.value)


def test_a_missing_plugin_names_the_path():
    with problem("PYTHONPATH"):
        parse("--plugin", "nowhere_to_be_found.at_all")


def test_a_checkpoint_does_not_import_the_plugins_of_its_run():
    saved = {"plugins": {"plugin": ["evil"]}, "schedule": {"lr_decay_style": "horns"}}
    with problem("--plugin evil: give that flag again"):
        parse_config_for_checkpoint(NETWORK, saved, {})
    assert "evil" not in sys.modules


def test_hooks_and_metrics_are_not_needed_to_open_a_checkpoint():
    saved = {
        "plugins": {"plugin": ["evil"], "hook": ["horns"], "metric": ["tail"]},
        "schedule": {"lr_decay_style": "cosine"},
    }
    config, _ = parse_config_for_checkpoint(NETWORK, saved, {})
    assert config.schedule.lr_decay_style == "cosine"
    assert "evil" not in sys.modules


@pytest.mark.parametrize("given", [True, False])
def test_tools_that_take_no_flags_of_training_take_plugins(stairs, given):
    saved = {
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16},
        "plugins": {"plugin": [stairs], "hook": ["horns"]},
        "training": {"micro_batch_size": 1},
        "schedule": {"lr": 0.1, "lr_decay_style": "stairs"},
        "extensions": {"StairsConfig": {"stairs": 16}},
    }
    if not given:
        with problem(f"--plugin {stairs}: give … --lr-decay-style stairs"):
            parse_saved_config(["--input_folder", "x"], saved)
        return
    config = parse_saved_config(["--input_folder", "x", "--plugin", stairs], saved)
    assert config.extensions["StairsConfig"].stairs == 16
    # The converted checkpoint records them as the first one does.
    assert (config.plugins.plugin, config.plugins.hook) == ([stairs], ["horns"])


def test_a_checkpoint_of_a_run_with_plugins_opens_with_them(stairs):
    saved = {
        "plugins": {"plugin": [stairs]},
        "schedule": {"lr_decay_style": "stairs"},
        "extensions": {"StairsConfig": {"stairs": 16}},
    }
    config, _ = parse_config_for_checkpoint([*NETWORK, "--plugin", stairs], saved, {})
    assert config.schedule.lr_decay_style == "stairs"
    assert config.extensions["StairsConfig"].stairs == 16
    assert config.plugins.plugin == [stairs]


def test_hooks_and_metrics_are_planned_with_their_flags(stairs):
    assert plugins.plan_plugins(parse("--plugin", stairs).plugins, {}).modules == (stairs,)


def test_a_plugin_can_be_a_file(stairs, tmp_path):
    file = str(tmp_path / "stairs_plugin.py")
    config = parse("--plugin", file, "--plugin", file, "--lr-decay-style", "stairs")
    assert config.plugins.plugin == [file, file]
    assert sys.modules["stairs_plugin"].__file__ == file
    # A checkpoint of either spelling opens with the other.
    saved = {"plugins": {"plugin": ["stairs_plugin"]}, "schedule": {"lr_decay_style": "stairs"}}
    assert not [*plugins.missing_plugins(saved, [f"elsewhere/{stairs}.py"])]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("stairs_plugins.py", "no such file … stairs_plugin.py"),
        ("json.py", "another module is called json … rename the file"),
        ("stairs_plugin", "give the name of a module, or the path of a .py file"),
    ],
)
def test_a_file_that_cannot_be_a_plugin(stairs, tmp_path, name, says):
    (tmp_path / "json.py").write_text("")
    with problem(f"--plugin {tmp_path / name}: … {says}"):
        parse("--plugin", str(tmp_path / name))


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("steps: int = 4", "StairsConfig.steps: a flag needs a help text"),
        ("lr: float = 4.0\n    'Help.'", "StairsConfig.lr … --lr … rename"),
        ("no_load_optim: int = 4\n    'Help.'", "there is a flag --no-load-optim already: rename"),
        ("table: dict = None\n    'Help.'", "StairsConfig.table: … dict … cannot be a flag"),
        ("both: int | str = 1\n    'Help.'", "StairsConfig.both: int | str cannot be a flag"),
    ],
)
def test_a_field_that_makes_no_flag(stairs, tmp_path, field, says):
    source = MODULE.replace("stairs: int = 4\n    '''Number of steps.'''", field)
    (tmp_path / "stairs_plugin.py").write_text(source)
    with problem(says):
        parse("--plugin", stairs)


def test_a_plugins_dataclass_can_check_its_flags(stairs, tmp_path):
    check = "\n    def __post_init__(self):\n        raise ValueError('--stairs must be odd')\n"
    (tmp_path / "stairs_plugin.py").write_text(
        MODULE.replace("'''Number of steps.'''", f"'''Number of steps.'''\n{check}")
    )
    with problem("StairsConfig: --stairs must be odd"):
        parse("--plugin", stairs)


def problems_of(config, objective="gpt"):
    def value_of(section, field):
        return objective if field == "objective" else getattr(getattr(config, section), field)

    return [*plugins.plugin_problems(value_of, config.extensions)]


def test_a_flag_whose_part_is_not_chosen_is_refused(stairs):
    assert problems_of(parse("--plugin", stairs)) == []
    (problem,) = problems_of(parse("--plugin", stairs, "--stairs", "8"))
    assert "--stairs is of --lr-decay-style stairs" in problem
    chosen = parse("--plugin", stairs, "--stairs", "8", "--lr-decay-style", "stairs")
    assert problems_of(chosen) == []


def test_a_flag_without_default_is_required_by_its_part_alone(stairs, tmp_path):
    (tmp_path / "stairs_plugin.py").write_text(MODULE.replace("int = 4", "int"))
    assert problems_of(parse("--plugin", stairs)) == []
    (problem,) = problems_of(parse("--plugin", stairs, "--lr-decay-style", "stairs"))
    assert problem == "--lr-decay-style stairs needs --stairs"


def test_a_folder_of_that_name_is_no_module(tmp_path, monkeypatch):
    (tmp_path / "shadowed_plugin").mkdir()
    file = tmp_path / "files" / "shadowed_plugin.py"
    file.parent.mkdir()
    file.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_plugins([str(file)])
    assert sys.modules["shadowed_plugin"].VALUE == 1
    del sys.modules["shadowed_plugin"]
