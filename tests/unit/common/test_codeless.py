"""Messages between processes: round trips, and bytes of strangers."""

import json
import math
import os
import pickle
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import problem

from megatron.common.codeless import MessageError, decode, encode
from megatron.common.errors import ConfigError, WrongDataError


class Stage(IntEnum):
    FIRST = 1


@dataclass(frozen=True)
class Part:
    name: str
    shape: tuple[int, ...]
    files: frozenset[str] = frozenset()


@dataclass
class Counting:
    made: int = 0
    items: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made += 1


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(10**30), 0.1, math.inf, "é\udcff\n", b"\x00\xff", []),
        {"tuple": [1, 2], "record": ()},
        {1: "a", ("b", 2): [None, {"c": {}}], None: 1},
        [(0, ("w", ("all", 2)), 7), {1, 2}, frozenset({(1, 2)})],
        Path("a/b c"),
        [Part("p", (2, 3), frozenset({"f"})), Part("q", ())],
        Stage.FIRST,
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_types(value):
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_nan_and_numbers_of_numpy_come_back_as_floats():
    first, second = decode(encode((math.nan, np.float64(0.1))))
    assert math.isnan(first)
    assert (second, type(second)) == (0.1, float)


def test_an_error_comes_back_with_its_kind_words_and_attributes():
    found = decode(encode([ConfigError("a", "b"), WrongDataError("c")]))
    assert [type(each) for each in found] == [ConfigError, WrongDataError]
    assert [str(each) for each in found] == ["a\nb", "c"]
    assert found[0].problems == ("a", "b")


def test_no_constructor_is_called():
    assert decode(encode(Counting(made=1, items={(1,): Part("p", ())}))).made == 2


@pytest.mark.parametrize("value", [object(), len, Counting, np.zeros(2), [{"a": (1, {2j})}]])
def test_what_is_no_plain_object_is_not_sent(value):
    with pytest.raises(TypeError, match="cannot contain"):
        encode(value)


def test_a_class_inside_a_function_is_not_sent():
    @dataclass
    class Inner:
        x: int

    with problem("Inner", TypeError):
        encode(Inner(1))


class Runs:
    def __reduce__(self):
        return os.mkdir, ("owned",)


STRANGE = [
    b"",
    b"\x00\xff\x80garbage",
    b"[1, 2",
    b"[" * 100_000,
    b'{"unknown": 1}',
    b'{"tuple": [1], "set": [2]}',
    b"{}",
    b'{"tuple": 5}',
    b'{"dict": [1, 2, 3]}',
    b'{"dict": [[], 1]}',
    b'{"bytes": "%"}',
    b'{"bytes": [1]}',
    b'{"record": []}',
    b'{"record": ["os", "system", "mkdir owned"]}',
    b'{"record": ["subprocess", "Popen", "mkdir owned"]}',
    b'{"record": ["antigravity", "x"]}',
    b'{"record": [["os"], "x"]}',
    b'{"record": ["os", ["x"]]}',
    b'{"record": ["megatron.nothing", "x"]}',
    b'{"record": ["megatron..common", "x"]}',
    b'{"record": ["megatron.common.errors", "ConfigError", "x"]}',
    b'{"record": ["megatron.training.process.dead_ranks", "Peer", 1]}',
    b'{"member": ["os", "system", "x"]}',
    b'{"member": ["signal", "Signals", "NONE"]}',
    b'{"error": ["builtins", "SystemExit", [], {}]}',
    b'{"error": ["megatron.common.errors", "MegatronError", 1, {}]}',
    b'{"error": ["megatron.common.errors", "MegatronError", [], 1]}',
    b"9" * 10_000,
]


@pytest.mark.parametrize("content", STRANGE, ids=lambda content: repr(content[:50]))
def test_bytes_of_a_stranger_are_one_clear_error(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with problem("MASTER_ADDR:MASTER_PORT", MessageError):
        decode(content)
    assert not Path("owned").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_does_not_run(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trap = pickle.dumps(Runs(), protocol)
    with pytest.raises(MessageError):
        decode(trap)
    with pytest.raises(MessageError):
        decode(json.dumps({"record": trap.decode("latin-1")}).encode())
    assert not Path("owned").exists()
