"""Messages name programs as they are typed in this installation."""

import pytest

from megatron.common import installation
from megatron.common.commands import VERBS, program
from megatron.common.installation import in_this_installation


def test_every_program_that_pretrains_has_a_verb():
    programs = {file.stem for file in installation.ROOT.glob("pretrain_*.py")}
    assert programs == {module for module in VERBS.values() if module.startswith("pretrain_")}


@pytest.fixture
def installed(monkeypatch, command_line, tmp_path):
    """An installed package, whose megatron-train is running."""
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    command_line(tmp_path / "bin" / "megatron-train")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("deepspeed --num_gpus 4 … does", "deepspeed --num_gpus 4 --module pretrain_gpt … does"),
        (
            "`deepspeed --num_gpus N pretrain_bert.py --lr …`",
            "`deepspeed --num_gpus N --module pretrain_bert --lr …`",
        ),
        ("tools/preprocess_data.py makes", "megatron-preprocess makes"),
        ("python tools/why_step.py --load", "megatron why-step --load"),
        ("python tools/build_index.py --seq", "python -m megatron_tools.build_index --seq"),
        ("pretrain_t5.py trains", "megatron pretrain-t5 trains"),
        ("is for pretrain_gpt.py", "is for megatron-train"),
        (
            "python -m pip install --requirement requirements-server.txt",
            'python -m pip install "megatron-deepspeed[server]"',
        ),
        ("pip install -r requirements.txt", "pip install megatron-deepspeed"),
        ("nothing of this", "nothing of this"),
    ],
)
def test_an_installed_package_names_its_commands(installed, text, typed):
    assert in_this_installation(text) == typed


def test_a_module_that_was_started_is_named_as_one(installed, command_line):
    command_line(installed / "pretrain_t5.py", typed=("-m", "pretrain_t5"))
    text = in_this_installation("deepspeed --num_gpus 2 …")
    assert text == "deepspeed --num_gpus 2 --module pretrain_t5 …"


def test_a_verb_is_named_as_the_program(installed, command_line):
    command_line(installed / "megatron", typed=(str(installed / "megatron"), "serve", "--port"))
    assert program() == "megatron serve"
    command_line(installed / "megatron", typed=(str(installed / "megatron"), "fly"))
    assert program() == "megatron"


def test_a_checkout_names_its_scripts(command_line):
    script = str(installation.ROOT / "pretrain_gpt.py")
    command_line(script)
    text = "deepspeed --num_gpus 2 … or tools/plan.py"
    assert in_this_installation(text) == f"deepspeed --num_gpus 2 {script} … or tools/plan.py"


def test_another_program_is_not_named(command_line, tmp_path):
    command_line(tmp_path / "notebook.py")
    assert in_this_installation("deepspeed --num_gpus 2 …") == "deepspeed --num_gpus 2 …"
