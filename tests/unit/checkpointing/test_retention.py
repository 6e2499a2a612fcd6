"""Which checkpoints are kept."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem
from tiny import tiny_plan

from megatron.checkpointing.manifest import MANIFEST, published_tags, tag_of
from megatron.checkpointing.publish import prune, tags_to_delete

SAVE = ("--save", "runs", "--save-interval", "5")


def kept_of(iterations, *flags, newest=None, in_use=-1, proven=None):
    tags = [tag_of(i) for i in sorted(iterations, reverse=True)]
    newest = max(iterations) if newest is None else newest
    plan = tiny_plan(*SAVE, *flags).checkpoint
    proven = newest if proven is None else proven
    gone = tags_to_delete(tags, plan, newest=newest, in_use=in_use, proven=proven)
    return {i for i in iterations if tag_of(i) not in gone}


def test_everything_is_kept_by_default():
    assert kept_of({5, 10, 15}) == {5, 10, 15}


def test_the_newest_are_kept():
    assert kept_of({5, 10, 15, 20}, "--keep-last", "2") == {15, 20}


def test_multiples_are_kept_beside_the_newest():
    every = {5, 10, 15, 20, 25, 30}
    assert kept_of(every, "--keep-every", "10") == {10, 20, 30}
    assert kept_of(every - {30}, "--save-retain-interval", "10") == {10, 20, 25}
    assert kept_of(every, "--keep-every", "20", "--keep-last", "2") == {20, 25, 30}


def test_the_one_that_the_run_went_on_from_is_kept():
    assert kept_of({5, 10, 15, 20}, "--keep-last", "1", in_use=5) == {5, 20}


def test_nothing_goes_for_one_that_no_finite_step_has_followed():
    every = {5, 10, 15, 20}
    assert kept_of(every, "--keep-last", "1", proven=15) == {15, 20}
    assert kept_of(every, "--keep-last", "1", proven=10) == {10, 15, 20}
    assert kept_of(every, "--keep-last", "3", proven=10) == {10, 15, 20}
    assert kept_of(every, "--keep-last", "1", proven=-1) == every


def test_later_ones_that_could_not_be_read_do_not_take_the_place_of_the_newest():
    # The run went on from 5, past damaged ones, and has saved 10.
    assert kept_of({5, 10, 15, 20}, "--keep-last", "1", newest=10, in_use=5) == {5, 10, 15, 20}
    assert kept_of({2, 10, 15, 20}, "--keep-last", "1", newest=10) == {10, 15, 20}


@given(
    iterations=st.sets(st.integers(1, 100), min_size=1),
    last=st.integers(1, 5),
    every=st.integers(1, 20),
    data=st.data(),
)
def test_checkpoints_in_use_are_never_removed(iterations, last, every, data):
    newest = data.draw(st.sampled_from(sorted(iterations)))
    in_use = data.draw(st.sampled_from(sorted(iterations)))
    flags = ("--keep-last", str(last), "--keep-every", str(every))
    kept = kept_of(iterations, *flags, newest=newest, in_use=in_use)
    older = sorted((i for i in iterations if i <= newest), reverse=True)
    wanted = {i for i in iterations if i > newest or i % every == 0 or i == in_use}
    assert kept == wanted | set(older[:last])


def test_removal_renames_first_and_finishes_later(tmp_path: Path):
    for name in ("global_step5", "global_step10", "pruned-global_step1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    assert published_tags(tmp_path) == ["global_step10", "global_step5"]
    prune(tmp_path, ["global_step5"])
    assert [path.name for path in tmp_path.iterdir()] == ["global_step10"]


@pytest.mark.parametrize("flag", ["--keep-last", "--keep-every"])
def test_a_number_of_none_is_refused(flag):
    with problem(f"{flag} 0 … 1"):
        tiny_plan(*SAVE, flag, "0")
    with problem(f"{flag} … --save"):
        tiny_plan(flag, "2")
