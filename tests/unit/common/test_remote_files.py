"""Files at URLs: an S3 server, cut connections, other schemes, and messages without secrets."""

import errno
import io
import itertools
import os
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from object_store import BUCKET, SECRET
from problems import problem
from s3fs import S3FileSystem
from web_server import web_server

from megatron.checkpointing.remote import local_checkpoint
from megatron.common import remote_files
from megatron.common.errors import DataError
from megatron.common.remote_files import (
    PART_BYTES,
    RemoteError,
    download,
    exists,
    find_files,
    glob_urls,
    identity_of,
    list_folder,
    local_path,
    open_input,
    read_bytes,
    read_range,
    remove,
    rename,
    upload,
    url_problems,
    without_secrets,
    write_text,
)


@pytest.fixture(params=["s3", "memory", "file"])
def root(request, store, tmp_path):
    """Return a folder at a URL of each scheme."""
    return {
        "s3": f"{BUCKET}/{tmp_path.name}",
        "memory": f"memory://{tmp_path.name}",
        "file": f"file://{tmp_path}/remote",
    }[request.param]


def test_files_are_listed_read_renamed_and_removed(root):
    write_text(f"{root}/a/one.txt", "first")
    write_text(f"{root}/a/b/two.txt", "second")
    assert find_files(root) == {"a/one.txt": 5, "a/b/two.txt": 6}
    assert {name: entry["type"] for name, entry in list_folder(root).items()} == {"a": "directory"}
    assert glob_urls(f"{root}/a/*.txt") == [f"{root}/a/one.txt"]
    assert read_range(f"{root}/a/one.txt", 1, 3) == b"irs"
    before = identity_of(f"{root}/a/one.txt")
    write_text(f"{root}/a/one.txt", "other words")
    assert identity_of(f"{root}/a/one.txt") != before
    rename(f"{root}/a/one.txt", f"{root}/a/new.txt")
    assert not exists(f"{root}/a/one.txt")
    assert read_bytes(f"{root}/a/new.txt") == b"other words"
    remove(f"{root}/a/new.txt")
    remove(f"{root}/a/new.txt")
    assert [*find_files(root)] == ["a/b/two.txt"]
    assert find_files(f"{root}/nothing") == {}
    assert list_folder(f"{root}/nothing") == {}


class Faulty(MemoryFileSystem):
    """A store that fails to describe files, stalls when it reads them, and lists any name."""

    protocol = "faulty"
    listed = ""

    def info(self, path, **_):
        raise ConnectionError("cut")

    def ls(self, path, detail=True, **_):
        return [{"name": f"{path}{self.listed}", "type": "directory", "size": 0}]

    def cat_file(self, path, **_):
        time.sleep(0.5)
        raise FileNotFoundError


fsspec.register_implementation("faulty", Faulty, clobber=True)


def test_a_failed_request_does_not_mean_that_a_file_is_missing(repeats):
    repeats(attempts=1)
    for look in (exists, remove):
        with pytest.raises(OSError, match="cut"):
            look("faulty://there/file")


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failed_listing_of_a_folder_leaves_out_no_file(store, monkeypatch, tmp_path, failing):
    root = f"{BUCKET}/{tmp_path.name}"
    for name in ("a/1.txt", "b/2.txt", "b/c/3.txt"):
        write_text(f"{root}/{name}", "words")
    listed, ls = itertools.count(1), S3FileSystem._lsdir

    async def fail_once(*args, **options):
        if next(listed) == failing:
            raise ConnectionError("cut")
        return await ls(*args, **options)

    monkeypatch.setattr(S3FileSystem, "_lsdir", fail_once)
    assert glob_urls(f"{root}/*/?.txt") == [f"{root}/a/1.txt", f"{root}/b/2.txt"]
    assert next(listed) > 3
    listed = itertools.count(1)
    assert glob_urls(f"{root}/**/[23].txt") == [f"{root}/b/2.txt", f"{root}/b/c/3.txt"]
    listed = itertools.count(1)
    assert sorted(find_files(root)) == ["a/1.txt", "b/2.txt", "b/c/3.txt"]


@pytest.mark.parametrize("name", ["..", "more/../../secrets"])
def test_a_name_that_leaves_its_folder_is_refused(name):
    Faulty.listed = name
    with problem("faulty://bucket … name … ..", DataError):
        find_files("faulty://bucket")


def test_large_files_go_up_and_come_down_over_connections_that_are_cut(store, tmp_path):
    content = os.urandom(2 * PART_BYTES + 12345)
    (tmp_path / "here").write_bytes(content)
    url = f"{BUCKET}/large"
    upload(tmp_path / "here", url)
    store.proxy.cut_next(4, after=1 << 20)
    download(url, tmp_path / "folder" / "there")
    assert (tmp_path / "folder" / "there").read_bytes() == content
    assert store.proxy.cut == 4
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["there"]
    store.proxy.cut_next(2, after=1 << 20)
    with open_input(url) as file:
        assert file.read(100) == content[:100]
        file.seek(-50, io.SEEK_END)
        assert file.read() == content[-50:]
        file.seek(PART_BYTES - 10)
        assert file.read(20) == content[PART_BYTES - 10 : PART_BYTES + 10]
        file.seek(0)
        assert file.read() == content
    assert store.proxy.cut == 2


class Unavailable(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *words):
        """Print nothing."""


def test_repeated_requests_to_s3_leave_the_stream_of_random_alone(monkeypatch, repeats, caplog):
    S3FileSystem.clear_instance_cache()
    repeats(attempts=4, first_pause_s=0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        before = random.getstate()
        with problem("4 attempts … s3://", remote_files.RemoteError):
            remote_files.read_bytes(f"s3://bucket-{server.server_port}/file")
        server.shutdown()
    S3FileSystem.clear_instance_cache()
    assert random.getstate() == before
    assert "3 attempts" in caplog.text


def test_a_request_that_stalls_is_reported(repeats, caplog):
    repeats(silence_s=0.05)
    with pytest.raises(FileNotFoundError):
        read_bytes("faulty://slow")
    assert "for 0.05 s" in caplog.text


def test_attempts_are_bounded_and_the_message_has_no_secrets(store, repeats):
    repeats(attempts=2)
    write_text(f"{BUCKET}/text", "words")
    with pytest.raises(RemoteError) as found:
        read_range(f"{BUCKET}/text", 0, 500)
    message = str(found.value)
    assert found.value.errno == errno.ETIMEDOUT
    assert "after 2 attempts" in message
    assert f"{BUCKET}/text" in message
    assert SECRET not in message


def test_errors_that_do_not_pass_are_raised_at_once(store, repeats, modules):
    repeats(first_pause_s=1000.0)
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{BUCKET}/missing'"):
        read_bytes(f"{BUCKET}/missing")
    with problem("nonsense://bucket/key … Protocol"):
        read_bytes("nonsense://bucket/key")
    with problem("s3://bucket/key … password … environment"):
        read_bytes("s3://user:word@bucket/key")
    modules("gcsfs")
    with problem("gs://bucket/key … gcsfs"):
        read_bytes("gs://bucket/key")
    modules("fsspec")
    with problem("fsspec"):
        open_input(f"{BUCKET}/missing")


def test_secrets_are_removed_from_messages(tmp_path):
    text = "cannot read https://me:pass@host/a?X-Amz-Signature=1f2e3d of AKIAIOSFODNN7EXAMPLE"
    assert without_secrets(text) == "cannot read https://host/a of ***"
    header = "{'Authorization': 'Bearer ya29.a0AfH6SMBx-y_z12345'}"
    assert without_secrets(header) == "{'Authorization': 'Bearer ***'}"
    assert [*url_problems("--save", "s3://bucket/run")] == []
    (problem,) = url_problems("--save", "s3://key:word@bucket/run?token=abc")
    assert "word" not in problem.split("leave")[0]
    assert "abc" not in problem


def test_local_paths_of_urls_stay_in_the_cache(tmp_path):
    assert local_path("s3://bucket/a/b", tmp_path) == tmp_path / "s3" / "bucket" / "a" / "b"
    assert local_path("s3://bucket/../../b", tmp_path) == tmp_path / "s3" / "bucket" / "b"


@pytest.fixture
def web():
    with web_server() as running:
        yield running


def test_a_question_mark_begins_the_query_of_a_web_address(web):
    web.files["a.jsonl"] = b"{}"
    assert glob_urls(f"{web.url}/a.jsonl?version=1") == [f"{web.url}/a.jsonl?version=1"]
    assert glob_urls(f"{web.url}/b.jsonl?version=1") == []


def test_a_file_that_a_web_server_replaces_is_another_one(web):
    url = f"{web.url}/texts/a.jsonl"
    web.files["texts/a.jsonl"] = b'{"text": "first"}\n'
    before = identity_of(url)
    assert before == identity_of(url)
    assert open_input(url).read() == web.files["texts/a.jsonl"]
    web.files["texts/a.jsonl"] = b'{"text": "other"}\n'  # as many bytes
    assert identity_of(url) != before


@pytest.fixture
def hub(web, monkeypatch):
    """Return the files of a server that huggingface_hub takes for its hub, as HF_ENDPOINT makes it."""
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, web.url)
    for name, value in {"HUGGINGFACE_CO_URL_TEMPLATE": template, "ENDPOINT": web.url}.items():
        monkeypatch.setattr(constants, name, value)
    hub.HfFileSystem.clear_instance_cache()
    yield web.files
    hub.HfFileSystem.clear_instance_cache()


def test_repositories_of_a_hub_are_listed_and_read(hub, tmp_path):
    data = bytes(range(256)) * 100
    hub |= {"datasets/me/texts/data/a.jsonl": data, "datasets/me/texts/README.md": b"card"}
    root = "hf://datasets/me/texts"
    assert glob_urls(f"{root}/data/*.jsonl") == [f"{root}/data/a.jsonl"]
    assert find_files(root) == {"data/a.jsonl": len(data), "README.md": 4}
    assert read_range(f"{root}/data/a.jsonl", 1000, 5000) == data[1000:6000]
    download(f"{root}/data/a.jsonl", tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == data
    assert not exists(f"{root}/none")
    assert not exists("hf://datasets/me/none/a.jsonl")


def test_a_model_of_a_hub_is_downloaded(hub, tmp_path):
    hub |= {"models/me/small/config.json": b"{}", "models/me/small/weights/a": b"weights"}
    found = local_checkpoint("hf://me/small", tmp_path)
    assert (found / "config.json").read_bytes() == b"{}"
    assert (found / "weights" / "a").read_bytes() == b"weights"
