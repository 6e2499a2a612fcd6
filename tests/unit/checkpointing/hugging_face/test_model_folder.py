"""Files of a model folder: indexes that name other files, and weights that are none."""

import json
import os

import pytest
import torch
from problems import problem
from safetensors.torch import save_file

from megatron.checkpointing.conversion.model_folder import INDEX, Reader
from megatron.common.errors import CheckpointError


@pytest.mark.parametrize(
    "weight_map",
    [3, [1], "a", {"a": 3}, {"a": []}, {"a": ["b"]}, {"a": None}, {"a": True}, {"a": {}}],
    ids=str,
)
def test_an_index_of_other_content_is_damaged(tmp_path, weight_map):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="index.json (is damaged|names)"):
        Reader(tmp_path)


@pytest.mark.parametrize(
    "text", ["3", "[]", "{}", "[" * 100_000, "\x00"], ids=lambda text: text[:5]
)
def test_an_index_without_a_map_is_damaged(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with problem("index.json … damaged", CheckpointError):
        Reader(tmp_path)


@pytest.mark.parametrize("kind", ["relative", "absolute", "..", ".", "", "fifo", "folder", "none"])
def test_an_index_names_files_of_its_folder_alone(tmp_path, kind):
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    os.mkfifo(folder / "fifo")
    name = {"relative": "../other.safetensors", "absolute": str(tmp_path / "other.safetensors")}
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name.get(kind, kind)}}))
    with problem("index.json names … file", CheckpointError):
        Reader(folder)


@pytest.mark.parametrize(
    "content", [3, [torch.ones(2)], torch.ones(2)], ids=["3", "list", "tensor"]
)
def test_a_torch_file_without_a_state_dict_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with problem("pytorch_model.bin … state dict", CheckpointError):
        Reader(tmp_path)


def test_links_to_files_elsewhere_are_followed(tmp_path):
    """The hub's cache has links in place of files."""
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "m.safetensors").symlink_to(tmp_path / "blob")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "m.safetensors"}}))
    with Reader(folder) as reader:
        assert [*reader.names] == ["a"]
