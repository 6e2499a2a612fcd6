"""Names of checkpoints, and the moment from which one counts."""

import os

import pytest
from problems import problem

from megatron.checkpointing.manifest import (
    MANIFEST,
    iteration_of,
    published_tags,
    staging_tag_of,
    tag_of,
)
from megatron.checkpointing.publish import clear_staging, publish, restore_replaced, tidy
from megatron.common.errors import CheckpointError


def stage(directory, iteration, content):
    folder = clear_staging(directory, iteration)
    (folder / "a.pt").write_text(content)
    (folder / MANIFEST).write_text("{}")
    return folder


def test_a_staged_checkpoint_does_not_count(tmp_path):
    stage(tmp_path, 5, "a")
    assert published_tags(tmp_path) == []
    assert not (tmp_path / "latest").exists()


def test_leftovers_of_a_killed_run_are_removed_and_those_of_tools_are_kept(tmp_path):
    stage(tmp_path, 5, "a")
    (tmp_path / "staging-for_transformers").mkdir()
    clear_staging(tmp_path, 10)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["staging-for_transformers", "staging-global_step10"]


def test_publishing_gives_the_staged_folder_its_name(tmp_path):
    folder = stage(tmp_path, 5, "a")
    publish(tmp_path, 5)
    assert not folder.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step5", "latest"]
    assert (tmp_path / "global_step5" / "a.pt").read_text() == "a"


def test_latest_names_what_was_published_last(tmp_path):
    for iteration in (10, 5):
        stage(tmp_path, iteration, "a")
        publish(tmp_path, iteration)
    assert (tmp_path / "latest").read_text() == "global_step5"


def test_the_same_iteration_is_replaced(tmp_path):
    for content in ("old", "new"):
        stage(tmp_path, 5, content)
        publish(tmp_path, 5)
    assert (tmp_path / "global_step5" / "a.pt").read_text() == "new"


def test_a_replaced_checkpoint_is_restored_if_the_new_one_is_missing(tmp_path):
    stage(tmp_path, 5, "old")
    publish(tmp_path, 5)
    (tmp_path / "global_step5").rename(tmp_path / "replaced-global_step5")
    clear_staging(tmp_path, 10)
    assert published_tags(tmp_path) == ["global_step5"]
    assert (tmp_path / "global_step5" / "a.pt").read_text() == "old"


def test_a_replaced_checkpoint_is_removed_if_the_new_one_is_published(tmp_path):
    stage(tmp_path, 5, "new")
    publish(tmp_path, 5)
    (tmp_path / "replaced-global_step5").mkdir()
    restore_replaced(tmp_path)
    assert (tmp_path / "replaced-global_step5").is_dir()
    tidy(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step5", "latest"]


def test_a_name_that_another_process_gave_back_in_this_moment_is_right(tmp_path, monkeypatch):
    stage(tmp_path, 5, "old")
    publish(tmp_path, 5)
    (tmp_path / "global_step5").rename(tmp_path / "replaced-global_step5")
    usual = os.rename

    def slower(source, target):
        usual(source, target)
        raise FileNotFoundError(source)

    monkeypatch.setattr(os, "rename", slower)
    restore_replaced(tmp_path)
    assert published_tags(tmp_path) == ["global_step5"]


def test_leftovers_of_a_killed_run_are_tidied(tmp_path):
    for iteration in (5, 10):
        stage(tmp_path, iteration, "a")
        publish(tmp_path, iteration)
    stage(tmp_path, 15, "half")
    (tmp_path / "pruned-global_step1").mkdir()
    (tmp_path / "latest").write_text("global_step5")
    tidy(tmp_path, 10)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["global_step10", "global_step5", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step10"


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with problem("--save … file/runs: Not a directory", CheckpointError):
        clear_staging(tmp_path / "file" / "runs", 5)


def test_a_run_killed_while_replacing_leaves_a_whole_checkpoint(tmp_path, os_calls):
    stage(tmp_path, 5, "old")
    publish(tmp_path, 5)
    stage(tmp_path, 5, "new")

    os_calls("rename", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, 5)
    assert published_tags(tmp_path) == ["global_step5"]


def test_a_staging_folder_of_a_killed_run_is_cleared(tmp_path):
    stage(tmp_path, 5, "a")
    stage(tmp_path, 15, "b")
    assert [path.name for path in tmp_path.iterdir()] == ["staging-global_step15"]
    folder = clear_staging(tmp_path, 15)
    assert [*folder.iterdir()] == []


def test_clearing_keeps_checkpoints_and_other_files(tmp_path):
    stage(tmp_path, 5, "a")
    publish(tmp_path, 5)
    (tmp_path / "journal.jsonl").write_text("{}")
    clear_staging(tmp_path, 10)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["global_step5", "journal.jsonl", "latest", "staging-global_step10"]


def test_the_directory_is_made(tmp_path):
    assert clear_staging(tmp_path / "a" / "b", 1).is_dir()


def test_published_checkpoints_are_listed_newest_first_by_number(tmp_path):
    for name in ("global_step9", "global_step10", "global_step100", "staging-global_step200", "x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
    (tmp_path / "global_step300").mkdir()
    assert published_tags(tmp_path) == ["global_step100", "global_step10", "global_step9"]


def test_a_directory_that_does_not_exist_holds_none(tmp_path):
    assert published_tags(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("tag", "iteration"),
    [("global_step12", 12), ("staging-global_step12", None), ("global_step", None), ("x", None)],
)
def test_tags_carry_the_iteration(tag, iteration):
    assert iteration_of(tag) == iteration


def test_a_staging_tag_is_none_that_counts():
    assert iteration_of(tag_of(3)) == 3
    assert iteration_of(staging_tag_of(3)) is None
