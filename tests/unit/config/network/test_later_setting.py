"""What follows from the declaration of a setting of the network that is added later."""

import json
from dataclasses import dataclass

import pytest
from problems import problem
from tiny import tiny_plan, tiny_spec

from megatron.checkpointing.compare import Difference, other_changes, require_same
from megatron.checkpointing.expressed import not_expressed, plain_values
from megatron.common.errors import CheckpointError
from megatron.config import network_contract
from megatron.config.architecture.architecture import Architecture
from megatron.config.config import SECTIONS
from megatron.config.flag_names import flag_setting
from megatron.config.network import model_resolution, model_spec
from megatron.config.network.model import ModelConfig, VocabularySpec
from megatron.config.network.model_spec import every_field, flat, spec_of
from megatron.config.parsing.declaration import setting


@dataclass(frozen=True, kw_only=True)
class LaterConfig(ModelConfig):
    """The network, with two settings more."""

    embedding_softcap: float | None = setting(None, above=0)
    """Bound of the features of the embedding."""

    embedding_noise: float = setting(0.0, at_least=0, in_weights=False)
    """Noise in training, added to the features of the embedding."""


@dataclass(frozen=True, kw_only=True)
class LaterVocabulary(VocabularySpec):
    """The table of tokens, with what these settings decide."""

    embedding_softcap: float = 0.0
    embedding_noise: float = 0.0


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """Put both classes in place of those that they extend, as if the fields were added there."""
    monkeypatch.setitem(SECTIONS, "model", LaterConfig)
    monkeypatch.setitem(model_spec._PARTS, "vocabulary", LaterVocabulary)
    for owner, name, later in (
        (network_contract, "ModelConfig", LaterConfig),
        (model_resolution, "ModelConfig", LaterConfig),
        (model_resolution, "VocabularySpec", LaterVocabulary),
        (Architecture, "options", every_field() - {"relative_buckets", "relative_max_distance"}),
    ):
        monkeypatch.setattr(owner, name, later)


def saved(*flags):
    return json.loads(json.dumps(tiny_plan(*flags).to_dict()))


def test_it_has_a_flag_a_range_and_a_field_of_the_plan():
    assert tiny_plan().model.vocabulary.embedding_softcap == 0.0
    spec = tiny_plan("--embedding-softcap", "2").model
    assert spec.vocabulary.embedding_softcap == 2.0
    assert flag_setting("embedding_softcap") == "--embedding-softcap"
    with problem("--embedding-softcap 0.0 … more than 0"):
        tiny_plan("--embedding-softcap", "0")


def test_manifests_have_it_and_those_from_before_it_are_read():
    spec = tiny_plan("--embedding-softcap", "2").model
    assert spec_of(flat(spec)) == spec
    older = {name: value for name, value in flat(tiny_spec()).items() if "embedding_" not in name}
    assert spec_of(older) == tiny_spec()


@pytest.mark.parametrize(
    ("objective", "flags", "reason"),
    [
        ("bert", [], "is for decoders"),
        ("t5", ["--decoder-seq-length", "6"], "is not built for networks with an encoder"),
    ],
)
def test_another_network_than_a_gpt_refuses_it(objective, flags, reason):
    with problem(f"--embedding-softcap {reason}"):
        tiny_plan("--embedding-softcap", "2", *flags, objective=objective)


def test_exporters_refuse_it_unless_weights_do_not_depend_on_it():
    spec = tiny_spec(embedding_softcap=2.0, embedding_noise=0.5)
    assert [*not_expressed(spec, plain_values(spec))] == [("embedding_softcap", 2.0, (0.0,))]


def test_a_checkpoint_with_another_value_is_refused_or_the_change_is_listed():
    capped, noisy = saved("--embedding-softcap", "2"), saved("--embedding-noise", "0.5")
    with pytest.raises(CheckpointError, match=r"--embedding-softcap +0\.0 +2\.0"):
        require_same(saved(), capped, "f")
    before = saved()
    del before["model"]["embedding_softcap"]
    require_same(before, saved(), "f")
    with problem("--embedding-softcap", CheckpointError):
        require_same(before, capped, "f")
    require_same(saved(), noisy, "f")
    assert [*other_changes(saved(), noisy)] == [Difference("--embedding-noise", 0.0, 0.5)]
