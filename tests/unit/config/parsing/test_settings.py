"""KEY=VALUE settings over YAML: precedence, groups, references, and what is left for flags."""

import pytest

from megatron.common.errors import ConfigError
from megatron.config.parsing.settings import read_settings

DEFAULTS = {"model.optim.lr": 0.1, "model.dataset.size": 8, "trainer.max_epochs": 3}


def values(argv, defaults=DEFAULTS):
    return {key: setting.value for key, setting in read_settings(argv, defaults)[0].items()}


def test_words_override_the_file_which_overrides_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("trainer: {max_epochs: 4}\nmodel:\n  optim: {lr: 0.2}\n")
    argv = [f"--config-path={tmp_path}", "--config-name", "run", "model.optim.lr=0.3"]
    settings, flags = read_settings(argv, DEFAULTS)
    assert {key: setting.value for key, setting in settings.items()} == {
        "model.optim.lr": 0.3,
        "model.dataset.size": 8,
        "trainer.max_epochs": 4,
    }
    assert flags == []
    assert settings["trainer.max_epochs"].location == f"{tmp_path / 'run.yaml'}, line 1"


def test_other_words_are_flags():
    assert read_settings(["--lr", "0.5", "a.b=1", "--bf16"], {})[1] == ["--lr", "0.5", "--bf16"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["+a.b=1", "++a.c=2"], {"a.b": 1, "a.c": 2}),
        (["a={b: 1, c: {d: 2}}"], {"a.b": 1, "a.c.d": 2}),
        (["a.b=1", "a.c=2", "~a"], {}),
        (["a.b=1", "a=null"], {}),
        (["a.b=[1,2]", "c=x:y"], {"a.b": [1, 2], "c": "x:y"}),
        (["a.b=7", "c=${a.b}", "d=x${a.b}"], {"a.b": 7, "c": 7, "d": "x7"}),
        (["a.b=", "c=???"], {}),
    ],
)
def test_forms_of_words(words, found):
    assert values(words, {}) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=${b}"], "${b} names no other setting"),
        (["a=${b}", "b=${a}"], "names no other setting"),
        (["--config-name", "none"], "there is no file none.yaml"),
        (["--config-path", "folder"], "needs --config-name"),
    ],
)
def test_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_settings(words, {})
    assert message in str(caught.value)
