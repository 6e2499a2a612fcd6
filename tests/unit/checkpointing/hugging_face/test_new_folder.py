"""A folder that is there as a whole or not at all."""

import os
from pathlib import Path

import pytest
from problems import problem

from megatron.checkpointing.conversion.model_folder import new_folder
from megatron.common.errors import CheckpointError


def test_it_replaces_an_empty_folder_also_through_a_link(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with new_folder(tmp_path / "link") as staging:
        (staging / "file").write_text("whole")
        assert [*(tmp_path / "empty").iterdir()] == []
    assert (tmp_path / "empty/file").read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link"}


def test_an_error_leaves_nothing(tmp_path):
    for error, seen in ((OSError("no room"), CheckpointError), (KeyError("name"), KeyError)):
        with pytest.raises(seen), new_folder(tmp_path / "new") as staging:
            (staging / "file").touch()
            raise error
    assert [*tmp_path.iterdir()] == []


def test_where_somebody_works_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused = (
        (".", "--save . … current"),
        (tmp_path / "here", "/here … current"),
        ("..", "--save .. … empty"),
    )
    for output, message in refused:
        with problem(message, CheckpointError), new_folder(Path(output)):
            raise AssertionError("it was begun")
    with new_folder(Path("model")):
        pass
    assert [*(tmp_path / "here").iterdir()] == [tmp_path / "here/model"]


def test_a_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with problem(f"mount point … {tmp_path}/model", CheckpointError), new_folder(tmp_path):
        raise AssertionError("it was begun")
    with new_folder(tmp_path / "model"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
