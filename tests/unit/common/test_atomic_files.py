"""Atomic writes: files and folders appear complete or not at all."""

import pytest

from megatron.common.atomic_files import replace_text, staged_folder


@pytest.mark.parametrize("has_one_writer", [False, True])
def test_a_file_is_replaced_completely(tmp_path, has_one_writer):
    file = tmp_path / "file"
    for text in ("older", "newer, é"):
        replace_text(file, text, has_one_writer=has_one_writer)
        assert file.read_text(encoding="utf-8") == text
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_replaced_is_as_before(tmp_path, os_calls, error):
    file = tmp_path / "file"
    file.write_text("older")
    os_calls("replace", error)
    with pytest.raises(type(error)):
        replace_text(file, "newer")
    assert file.read_text() == "older"
    assert [*tmp_path.iterdir()] == [file]


def test_what_a_killed_process_left_is_taken_over(tmp_path):
    (tmp_path / "file.staging").write_text("half")
    replace_text(tmp_path / "file", "complete", has_one_writer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "staging" / "deep").mkdir(parents=True)
    with staged_folder(tmp_path / "staging", tmp_path / "folder") as staging:
        assert [*staging.iterdir()] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_all_in_a_folder_is_on_disk_before_it_counts(tmp_path, os_calls):
    done = os_calls("fsync")
    staging, target = tmp_path / "staging", tmp_path / "folder"
    with staged_folder(staging, target):
        (staging / "deep").mkdir()
        for name in ("config.json", "deep/weights"):
            (staging / name).touch()
    paths = (staging, staging / "config.json", staging / "deep", staging / "deep/weights")
    assert sorted(done[:-1]) == [*map(str, paths)]
    assert done[-1] == str(tmp_path)


def test_a_folder_does_not_replace_another(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with pytest.raises(OSError), staged_folder(tmp_path / "staging", tmp_path / "folder"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
