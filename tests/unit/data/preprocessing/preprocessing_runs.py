"""Preprocessing runs that tests kill, resume and compare."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from bytes_tokenizer import BytesTokenizer

from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec

ROOT = Path(__file__).parents[4]


SLOW = """
import sys, time
sys.path[:0] = [{root!r}, {here!r}]
from bytes_tokenizer import BytesTokenizer
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.preprocess import convert_share, merge_shards, preprocess
from megatron.common.errors import MegatronError

class Slow(BytesTokenizer):
    def encode(self, text):
        time.sleep({pause})
        return super().encode(text)

if __name__ == "__main__":
    try:
        preprocess(PreprocessSpec(inputs=("a.jsonl",), output_prefix="out", make_encoder=Slow,
            resume=True, shard_bytes=1500, block_bytes=200, append_eod=True, json_keys=("a", "b"), {more}))
    except MegatronError as error:
        sys.exit(str(error))
"""


def program(pause=0.0, more=""):
    here = str(ROOT / "tests")
    return SLOW.format(root=str(ROOT), here=here, pause=pause, more=more)


def outputs(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name.startswith("out_")}


def uninterrupted(directory):
    arguments = {"make_encoder": BytesTokenizer, "append_eod": True, "json_keys": ("a", "b")}
    prefix = directory / "whole" / "out"
    prefix.parent.mkdir()
    preprocess(
        PreprocessSpec(inputs=(str(directory / "a.jsonl"),), output_prefix=str(prefix), **arguments)
    )
    return outputs(directory / "whole")


def conversion(directory, **arguments):
    arguments = {"make_encoder": BytesTokenizer, "json_keys": ("a",), "resume": True} | arguments
    arguments = {"shard_bytes": 1500} | arguments
    inputs = (str(directory / "a.jsonl"),)
    return PreprocessSpec(inputs=inputs, output_prefix=str(directory / "out"), **arguments)


class Killed(BaseException):
    """Ends a run as a signal would."""


@contextmanager
def killed_before_rename_of(monkeypatch, suffix):
    def replace_until_killed(source, target, replace=os.replace):
        if str(target).endswith(suffix):
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("megatron.data.token_files.publish.os.replace", replace_until_killed)
        yield
