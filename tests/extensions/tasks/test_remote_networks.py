"""A task starts from checkpoints at URLs."""

from pathlib import Path

from object_store import BUCKET

from megatron.checkpointing.manifest import (
    MANIFEST,
    Manifest,
    names_in,
    published_tags,
    write_manifest,
)
from megatron.checkpointing.remote import url_of
from megatron.checkpointing.train_state import TrainState
from megatron.common.remote_files import upload, write_text
from megatron.config.parsing.parser import peek
from megatron.extensions.tasks.entry import with_pretrained_network


def test_a_checkpoint_in_one_file_is_downloaded(store, tmp_path):
    url = f"{BUCKET}/{tmp_path.name}/tagger.nemo"
    write_text(url, "archive")
    words = ["--load", url, "--s3-cache-path", str(tmp_path)]
    found = Path(peek(with_pretrained_network(words, is_first=True)).get("load"))
    assert (found.name, found.read_text()) == ("tagger.nemo", "archive")


def test_a_first_upload_that_was_killed_is_no_checkpoint_of_another_system(store, tmp_path):
    url = f"{BUCKET}/{tmp_path.name}/tuned"
    write_text(f"{url}/global_step5/weights.pt", "a part")
    words = ["--load", url, "--save", url, "--s3-cache-path", str(tmp_path)]
    directory = Path(peek(with_pretrained_network(words, is_first=True)).get("load"))
    assert {*names_in(directory)} == {"url.json", "fetch.lock"}


def test_the_network_of_checkpoints_is_found(store, tmp_path):
    url, folder = f"{BUCKET}/{tmp_path.name}/run", tmp_path / "global_step5"
    folder.mkdir()
    empty = {"plan": {}, "config": {}, "versions": {}, "partition_dims": {}, "files": ()}
    write_manifest(folder, Manifest(state=TrainState(iteration=5), **empty))
    upload(folder / MANIFEST, f"{url}/global_step5/{MANIFEST}")
    words = ["--load", url, "--save", f"{BUCKET}/tuned", "--s3-cache-path", str(tmp_path)]
    found = with_pretrained_network(words, is_first=True)
    load, save = (Path(peek(found)[name]) for name in ("load", "save"))
    assert published_tags(load) == ["global_step5"]
    assert url_of(save) == f"{BUCKET}/tuned"
