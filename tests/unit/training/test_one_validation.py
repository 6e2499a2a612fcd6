"""One start validates its config once, reads DeepSpeed's JSON once, and keeps no idle flag."""

import json
from pathlib import Path

import pytest
from tiny import tiny_argv

from megatron.config.checks import network
from megatron.training import pretrain
from megatron.training.entry import train_from

TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--device", "cpu")


class Planned(Exception):
    """The start has come as far as its plan."""


def test_a_start_validates_once_and_reads_the_json_once(tmp_path, monkeypatch):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").write_bytes(b"")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_clipping": 1.0}))
    reads, checks = [], []
    read_text, model_problems = Path.read_text, network.model_problems

    def counted_read(path, *args, **kwargs):
        reads.append(path)
        return read_text(path, *args, **kwargs)

    def counted_problems(*args, **kwargs):
        checks.append(args)
        return model_problems(*args, **kwargs)

    def stop(*_):
        raise Planned

    monkeypatch.setattr(Path, "read_text", counted_read)
    monkeypatch.setattr(network, "model_problems", counted_problems)
    monkeypatch.setattr(pretrain, "describe", stop)
    data = ("--data-path", str(tmp_path / "corpus"))
    with pytest.raises(Planned):
        train_from(
            tiny_argv(*TOKENIZER, *data, "--deepspeed_config", str(file)), "gpt", description=None
        )
    assert reads.count(file) == 1
    assert len(checks) == 1


def test_flags_of_another_type_of_tokenizer_are_left_out_with_a_notice(tmp_path, monkeypatch):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").write_bytes(b"")
    started = []

    def stop(start, *_, notices, **__):
        started.append((start.config.tokenizer.tiktoken_pattern, [*notices]))
        raise Planned

    monkeypatch.setattr(pretrain, "pretrain", stop)
    data = ("--data-path", str(tmp_path / "corpus"), "--tiktoken-pattern", "v2")
    with pytest.raises(Planned):
        train_from(tiny_argv(*TOKENIZER, *data), "gpt", description=None)
    notice = "--tiktoken-pattern has no effect without --tokenizer-type TikTokenizer"
    assert started == [(None, [notice])]
