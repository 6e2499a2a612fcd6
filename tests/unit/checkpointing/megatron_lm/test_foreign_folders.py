"""Folders of other programs are named as such, with what to do."""

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.megatron_lm.convert import find
from megatron.checkpointing.megatron_lm.detect import foreign_checkpoint_in, system_of
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint


@pytest.fixture
def torch_dist(tmp_path):
    """A folder as a run of Megatron core saves it."""
    folder = tmp_path / "run" / "iter_0000010"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "metadata.json", "common.pt"):
        (folder / name).write_bytes(b"")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    return tmp_path / "run"


@pytest.mark.parametrize("loader", [None, "megatron"])
def test_the_converter_recognises_torch_dist(torch_dist, loader):
    for path in (torch_dist, torch_dist / "iter_0000010"):
        assert system_of(path) == "torch_dist"
        with problem("metadata.json … --ckpt-format torch_dist", CheckpointError):
            find(path, loader)


@pytest.mark.parametrize("save", [True, False])
def test_training_names_torch_dist_and_what_to_do(torch_dist, group, save):
    flags = ["--load", str(torch_dist), *(["--save", str(torch_dist)] if save else [])]
    with problem("torch_dist … util.py --load-dir", WrongCheckpointError):
        choose_checkpoint(tiny_plan(*flags))


def test_training_names_a_model_of_transformers(tmp_path, group):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WrongCheckpointError) as caught:
        choose_checkpoint(tiny_plan("--load", str(tmp_path)))
    assert "Hugging Face's format" in str(caught.value)
    assert f"tools/convert_checkpoint/from_hf.py --load {tmp_path} --save NEW" in str(caught.value)


def test_training_names_a_checkpoint_of_megatron_lm(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    message = foreign_checkpoint_in(tmp_path)
    command = f"tools/checkpoint/util.py --saver own --load-dir {tmp_path} --save-dir NEW"
    assert message == f"Megatron-LM's, convert it with {command}, and write --load NEW"
    assert foreign_checkpoint_in(tmp_path / "none") == ""
