"""A network is parts in memory and one flat dictionary on disk."""

import json
from dataclasses import dataclass, replace
from itertools import chain

import pytest
from problems import problem
from tiny import tiny_plan, tiny_spec

from megatron.common.errors import CheckpointError
from megatron.common.registry import HEADS, NETWORKS
from megatron.config.network.experts import MoESpec
from megatron.config.network.lora import LoraSpec
from megatron.config.network.model_spec import defaults_of, flat, names_of, spec_of

OWN = {
    "gpt": {},
    "bert": {"num_token_types": 2, "binary_head": True, "labels": ("a", "b"), "num_outputs": 2},
    "t5": {"num_decoder_layers": 2, "decoder_seq_length": 6},
    "retro": {"retro_layers": (2,), "retro_chunk_length": 3, "final_norm": False},
}
"""Fields of what only some networks have."""


@pytest.mark.parametrize("architecture", OWN)
def test_a_network_comes_back_from_a_manifest(architecture):
    experts = {"num_experts": (1, 4), "lora_rank": 2, "lora_alpha": 4.0}
    spec = tiny_spec(architecture=architecture, own_flags=(("steep", 2.0),), **OWN[architecture])
    for each in (spec, spec_of(flat(spec) | experts)):
        assert spec_of(json.loads(json.dumps(flat(each)))) == each


def test_every_manifest_has_the_same_fields():
    for architecture, own in OWN.items():
        spec = tiny_spec(architecture=architecture, **own)
        assert [*flat(spec)] == [*flat(tiny_spec())]
        assert own.items() <= flat(spec).items()


def test_parts_that_a_network_lacks_have_their_defaults_on_disk():
    """So those of extensions agree with what is written without them."""
    parts = [MoESpec, LoraSpec, HEADS.get_class("classes").part]
    parts += [part for name in OWN if (part := NETWORKS.get_class(name).part)]
    plain = flat(tiny_spec())
    assert (tiny_spec().moe, tiny_spec().lora, tiny_spec().own, tiny_spec().head) == (None,) * 4
    for part in parts:
        assert vars(part()) == {name: plain[name] for name in names_of(part)}
        assert tiny_spec().part(part) == part()
    names = [*chain.from_iterable(map(names_of, parts))]
    assert len({*names}) == len(names)


def test_a_network_of_an_older_version_is_read():
    spec = tiny_plan("--num-experts", "4").model
    older = {name: value for name, value in flat(spec).items() if name not in defaults_of()}
    assert spec_of(older) == replace(spec, moe=None)


@pytest.mark.parametrize("field", [{"unknown": 0}, {"retro_layers": (2,)}])
def test_a_field_that_no_part_has_is_refused(field):
    with problem(f"not understood … {next(iter(field))}", CheckpointError):
        spec_of(flat(tiny_spec()) | field)


def test_a_part_of_a_plugins_network_stands_behind_the_others(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Decay:
        decay_rank: int = 0

    monkeypatch.setattr(NETWORKS.get_class("gpt"), "part", Decay)
    spec = spec_of(flat(tiny_spec()) | {"decay_rank": 3})
    assert spec.part(Decay).decay_rank == 3
    assert [*flat(spec)][-1] == "decay_rank"
    assert spec_of(flat(spec)) == spec
